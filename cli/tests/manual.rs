//! What shells, `man` and a bare `kvhoist status` know.

use std::process::{Command, Output};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
    command.args(args);
    command
}

fn kvhoist(args: &[&str]) -> Output {
    command(args).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

#[test]
fn a_bare_status_says_where_it_looked_and_why_nothing_answers() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("s").display().to_string();
    for args in [&["status"][..], &["top"], &["space", "rm", "a"]] {
        let output = command(args).env("KVHOIST_SOCKET", &socket).output().expect("it runs");
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{args:?}: {said}");
        for word in [&socket, "start `kvhoist serve` there", "is the default: --socket FILE or KVHOIST_SOCKET"] {
            assert!(said.contains(word), "{args:?}: {word} in {said}");
        }
    }
}

#[test]
fn shells_and_man_know_every_command_and_its_flags() {
    for (shell, flag) in [("bash", "--host-blocks"), ("zsh", "--host-blocks"), ("fish", "-l host-blocks")] {
        let script = kvhoist(&["completions", shell]);
        assert!(script.status.success(), "{}", text(&script.stderr));
        let script = text(&script.stdout);
        assert!(script.contains(flag) && script.contains("inspect") && script.contains("serve"), "{shell}: {script}");
    }
    assert_eq!(kvhoist(&["completions", "tcsh"]).status.code(), Some(2));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("UTF-8");
    assert!(kvhoist(&["man", path]).status.success());
    let page = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a page");
    for command in ["replay", "doctor", "serve", "status", "top", "verify", "wipe", "inspect"] {
        assert!(page("kvhoist.1").contains(&format!("kvhoist\\-{command}(1)")), "{command}");
        assert!(
            page(&format!("kvhoist-{command}.1")).contains("EXIT STATUS")
                || page(&format!("kvhoist-{command}.1")).contains("Exit status"),
            "{command}"
        );
    }
    assert!(page("kvhoist-serve.1").contains("\\-\\-allow\\-uid"));
    assert_eq!(kvhoist(&["man", "/nonexistent/folder"]).status.code(), Some(2));
}
