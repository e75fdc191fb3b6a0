//! The report: what was found, what is wrong with it, and the verdict.

use std::fmt;

use clap::ValueEnum;
use serde_json::{Value, json};

use super::{
    args::Args,
    finding::{Finding, Want},
};
use crate::{failure::Failure, output::emit, shown::plain};

/// Findings, by section.
pub struct Report {
    sections: Vec<(&'static str, Vec<Finding>)>,
    /// A device is configured or wanted: its sections are shown.
    has_device: bool,
    /// Somebody has named a path or settings: troubles with them are problems.
    is_asked_for: bool,
}

/// Sections that only those read who use a device.
const OF_DEVICES: [&str; 2] = ["device", "rdma"];

/// What does not work: troubles by name, and features that are missing.
pub struct Problems {
    troubles: Vec<String>,
    missing: Vec<String>,
}

impl Problems {
    pub fn is_empty(&self) -> bool {
        self.troubles.is_empty() && self.missing.is_empty()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (troubles, missing) = (self.troubles.len(), self.missing.join(", "));
        match troubles {
            0 => {}
            1 => write!(f, "found 1 problem ({})", self.troubles[0])?,
            _ => write!(f, "found {troubles} problems ({})", self.troubles.join(", "))?,
        }
        match (troubles, missing.is_empty()) {
            (_, true) => Ok(()),
            (0, _) => write!(f, "not available on this machine: {missing}"),
            _ => write!(f, "; not available on this machine: {missing}"),
        }
    }
}

impl Report {
    pub fn new(has_device: bool, is_asked_for: bool) -> Self {
        Report { sections: Vec::new(), has_device, is_asked_for }
    }

    /// Adds a section.
    pub fn add(&mut self, name: &'static str, findings: Vec<Finding>) {
        self.sections.push((name, findings));
    }

    fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.sections.iter().flat_map(|(_, findings)| findings)
    }

    /// What does not work, where these features are wanted.
    pub fn problems(&self, wanted: &[Want]) -> Problems {
        let is_problem = |finding: &&Finding| finding.is_trouble && self.is_asked_for;
        let troubles = self.findings().filter(is_problem).map(|finding| finding.what.to_string());
        // What nobody looked at, because there is no folder, is no feature that is missing.
        let decided = |want| self.findings().filter_map(|it| it.decides).filter(move |(decided, _)| *decided == want);
        let is_missing = |want: &&Want| decided(**want).count() > 0 && !decided(**want).any(|(_, is_there)| is_there);
        let name = |want: &Want| Some(want.to_possible_value()?.get_name().to_owned());
        Problems { troubles: troubles.collect(), missing: wanted.iter().filter(is_missing).filter_map(name).collect() }
    }

    /// Prints it, as the flags say.
    pub fn print(&self, args: &Args) -> Result<(), Failure> {
        if args.json {
            return emit(&format!("{:#}\n", self.object(&args.want)));
        }
        let problems = self.problems(&args.want);
        let verdict = if problems.is_empty() { "no problems found".to_owned() } else { problems.to_string() };
        emit(&format!("{}\nverdict: {}\n", self.table(args.full), plain(&verdict)))
    }

    fn object(&self, wanted: &[Want]) -> Value {
        let finding = |finding: &Finding| {
            json!({
                "what": finding.what,
                "found": finding.found,
                "fix": finding.fix,
                "there": finding.decides.map(|(_, is_there)| is_there),
                "trouble": finding.is_trouble,
            })
        };
        let mut object = serde_json::Map::new();
        for (name, findings) in &self.sections {
            object.insert((*name).to_owned(), findings.iter().map(finding).collect());
        }
        let problems = self.problems(wanted);
        object.insert("verdict".into(), json!({ "troubles": problems.troubles, "missing": problems.missing }));
        Value::Object(object)
    }

    /// All findings, or those that fit on a screen: without devices that nobody uses, and with fixes only for what does
    /// not work.
    fn table(&self, full: bool) -> String {
        let mut text = String::new();
        for (name, findings) in &self.sections {
            if !full && !self.has_device && OF_DEVICES.contains(name) {
                continue;
            }
            if full {
                text.push_str(&format!("{name}\n"));
            }
            for finding in findings.iter().filter(|it| full || self.has_device || !it.what.contains("device")) {
                let mark = match finding.decides {
                    _ if finding.is_trouble => "!",
                    Some((_, true)) => "+",
                    Some((_, false)) => "!",
                    None => " ",
                };
                text.push_str(&format!("{mark} {:14} {}\n", finding.what, plain(&finding.found)));
                if let Some(fix) = finding.fix.as_ref().filter(|_| full || mark == "!") {
                    text.push_str(&format!("  {:14} -> {}\n", "", plain(fix)));
                }
            }
        }
        text
    }
}
