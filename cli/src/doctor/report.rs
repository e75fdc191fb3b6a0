//! The report: what was found, what is wrong with it, and the verdict.

use std::{collections::HashSet, fmt};

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
    /// Features whose absence is a problem.
    wanted: Vec<Want>,
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

/// As `--want` takes it.
fn name(want: &Want) -> String {
    want.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

impl Report {
    pub fn new(wanted: Vec<Want>, has_device: bool, is_asked_for: bool) -> Self {
        let has_device = has_device || wanted.iter().any(|want| want.is_of_device());
        Report { sections: Vec::new(), wanted, has_device, is_asked_for }
    }

    /// Adds a section.
    pub fn add(&mut self, name: &'static str, findings: Vec<Finding>) {
        self.sections.push((name, findings));
    }

    fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.sections.iter().flat_map(|(_, findings)| findings)
    }

    /// What does not work.
    pub fn problems(&self) -> Problems {
        let is_problem = |finding: &&Finding| finding.is_trouble && self.is_asked_for;
        let troubles = self.findings().filter(is_problem).map(|finding| finding.what.to_string());
        // What nobody looked at, because there is no folder, is no feature that is missing. All paths must have one of
        // theirs; of several devices one is enough.
        let is_missing = |want: &&Want| {
            let decided = self.findings().filter_map(|finding| finding.decides);
            let there: Vec<bool> = decided.filter(|(decided, _)| decided == *want).map(|(_, there)| there).collect();
            let is_enough = if want.is_of_device() { there.contains(&true) } else { !there.contains(&false) };
            !there.is_empty() && !is_enough
        };
        Problems { troubles: troubles.collect(), missing: self.wanted.iter().filter(is_missing).map(name).collect() }
    }

    /// Troubles with a default that nobody has asked for.
    fn uncounted(&self) -> Vec<&str> {
        let findings = self.findings().filter(|finding| finding.is_trouble && !self.is_asked_for);
        findings.map(|finding| finding.what.as_ref()).collect()
    }

    /// Prints it, as the flags say.
    pub fn print(&self, args: &Args) -> Result<(), Failure> {
        if args.json {
            return emit(&format!("{:#}\n", self.object()));
        }
        let problems = self.problems();
        let verdict = match self.uncounted() {
            _ if !problems.is_empty() => problems.to_string(),
            troubles if troubles.is_empty() => "no problems found".to_owned(),
            troubles => format!("no problems found; with --path or --config would count: {}", troubles.join(", ")),
        };
        emit(&format!("{}\nverdict: {}\n", self.table(args.full), plain(&verdict)))
    }

    fn object(&self) -> Value {
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
        object.insert("wanted".into(), self.wanted.iter().map(name).collect());
        let problems = self.problems();
        object.insert("verdict".into(), json!({ "troubles": problems.troubles, "missing": problems.missing }));
        Value::Object(object)
    }

    /// What begins the line of a finding. The verdict counts those with `!`, and nothing else.
    fn mark(&self, finding: &Finding) -> &'static str {
        match finding.decides {
            _ if finding.is_trouble && self.is_asked_for => "!",
            _ if finding.is_trouble => "-",
            Some((_, true)) => "+",
            Some((feature, false)) if self.wanted.contains(&feature) => "!",
            Some((_, false)) => "-",
            None => " ",
        }
    }

    /// All findings, or those that fit on a screen: without devices that nobody uses, and with fixes only for what does
    /// not work (`!`) or could be better (`-`), each fix once.
    fn table(&self, full: bool) -> String {
        let mut text = String::new();
        let mut fixes = HashSet::new();
        for (name, findings) in &self.sections {
            if !full && !self.has_device && OF_DEVICES.contains(name) {
                continue;
            }
            if full {
                text.push_str(&format!("{name}\n"));
            }
            for finding in findings.iter().filter(|it| full || self.has_device || !it.what.contains("device")) {
                let mark = self.mark(finding);
                text.push_str(&format!("{mark} {:14} {}\n", finding.what, plain(&finding.found)));
                if let Some(fix) = finding.fix.as_ref().filter(|_| full || ["!", "-"].contains(&mark)) {
                    if !full && !fixes.insert(fix) {
                        continue;
                    }
                    text.push_str(&format!("  {:14} -> {}\n", "", plain(fix)));
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(wanted: Vec<Want>, found: &[(Want, bool)]) -> Report {
        let mut report = Report::new(wanted, false, true);
        let finding = |&(want, is_there)| Finding::note("a feature", "as it is").fix("mend it").decides(want, is_there);
        report.add("disk", found.iter().map(finding).collect());
        report
    }

    #[test]
    fn one_of_two_paths_without_direct_io_is_a_problem_and_one_of_two_devices_is_enough() {
        let of_paths = report(vec![Want::DirectIo], &[(Want::DirectIo, true), (Want::DirectIo, false)]);
        assert_eq!(of_paths.problems().to_string(), "not available on this machine: direct-io");
        let of_devices = report(vec![Want::Cuda], &[(Want::Cuda, false), (Want::Cuda, true)]);
        assert!(of_devices.problems().is_empty());
        assert!(report(vec![Want::DirectIo], &[]).problems().is_empty(), "nobody looked");
    }

    #[test]
    fn a_fix_of_two_findings_is_shown_once() {
        let both = report(vec![Want::Ring], &[(Want::Ring, false), (Want::LockedMemory, false)]);
        assert_eq!(both.table(false).matches("-> mend it").count(), 1, "{}", both.table(false));
        assert_eq!(both.table(true).matches("-> mend it").count(), 2);
    }

    #[test]
    fn only_what_the_verdict_counts_has_an_exclamation_mark() {
        let found = [(Want::LockedMemory, false), (Want::Ring, true)];
        let unwanted = report(vec![Want::Ring], &found);
        assert!(unwanted.problems().is_empty());
        let expected = "- a feature      as it is\n                 -> mend it\n+ a feature      as it is\n";
        assert_eq!(unwanted.table(false), expected);
        let wanted = report(vec![Want::LockedMemory], &found);
        assert!(!wanted.problems().is_empty() && wanted.table(false).starts_with("! "), "{}", wanted.table(false));
    }
}
