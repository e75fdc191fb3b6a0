//! Tells the command which commit it is built from.

use std::{fs, path::Path, process::Command};

fn main() {
    let version = env!("CARGO_PKG_VERSION");
    let shown = commit().map_or_else(|| version.to_owned(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=KVHOIST_VERSION={shown}");
    println!("cargo::rerun-if-changed=build.rs");
}

/// The commit of the checkout, or the one that a package from a registry was made of.
fn commit() -> Option<String> {
    if let Ok(text) = fs::read_to_string(".cargo_vcs_info.json") {
        let at = text.find("\"sha1\"")?;
        let mut parts = text[at..].split('"').skip(3);
        return parts.next().map(|sha| sha.chars().take(12).collect());
    }
    // A checkout of its own, and not whatever this lies in.
    if !Path::new("../.git").exists() {
        return None;
    }
    let head = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    println!("cargo::rerun-if-changed={head}");
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned())
}
