//! The tree keeps its own house rules.
//!
//! What no compiler and no tool says. Every failure names what was found and what was expected; each rule is checked on
//! small bad texts beside it.

#[path = "tidy/face.rs"]
mod face;
#[path = "tidy/layers.rs"]
mod layers;
#[path = "tidy/pages.rs"]
mod pages;
#[path = "tidy/rules.rs"]
mod rules;
#[path = "tidy/simulated.rs"]
mod simulated;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use rules::{check_events, check_rust, check_text, code};

#[test]
fn rust_files_keep_the_house_rules() {
    let files = rust_files();
    assert!(files.len() > 10, "found {} Rust files in {}, expected the whole tree", files.len(), root().display());
    report(&files.iter().flat_map(|file| check_rust(file, &read(file))).collect::<Vec<_>>());
}

#[test]
fn no_event_of_the_log_can_throw() {
    let is_shipped = |file: &&PathBuf| {
        ["src", "device/src", "base/src"].iter().any(|folder| file.starts_with(folder)) && !file.ends_with("tests.rs")
    };
    let files = rust_files();
    report(
        &files.iter().filter(is_shipped).flat_map(|file| check_events(file, &code(&read(file)))).collect::<Vec<_>>(),
    );
}

#[test]
fn no_file_names_a_machine() {
    // What is not text has nothing to read in it.
    let texts = tree().into_iter().filter_map(|file| Some((fs::read_to_string(root().join(&file)).ok()?, file)));
    report(&texts.flat_map(|(text, file)| check_text(&file, &text)).collect::<Vec<_>>());
}

#[test]
fn the_public_face_stays_small() {
    for (file, max) in face::NAMES_MAX {
        let code = code(&read(Path::new(file)));
        let found = face::names(&code);
        println!("{file}: {}", found.len());
        assert!(found.len() <= max, "{} public names in {file}, expected {max} at most: {found:?}", found.len());
    }
}

/// An example is what most readers look for first, and a doctest keeps it right.
#[test]
fn every_method_of_a_cache_and_of_a_client_has_an_example() {
    for (folder, name, count_min) in [("src/cache", "Cache", 25), ("service/src/client", "Client", 20)] {
        let methods = methods(folder, name);
        assert!(methods.len() > count_min, "found {} methods of {name}, expected all of them", methods.len());
        let bare: Vec<_> = methods.iter().filter(|(_, (_, has_example))| !has_example).collect();
        assert!(bare.is_empty(), "methods of {name} without an example in their documentation: {bare:#?}");
    }
}

/// What the seeds of the simulation do not call they do not test.
#[test]
fn every_call_of_a_cache_is_simulated_or_has_a_reason_not_to_be() {
    let of = |(of, _)| methods("src/cache", of).into_iter().map(move |(_, (method, _))| (of, method));
    let methods: Vec<(&str, String)> = simulated::TYPES.into_iter().flat_map(of).collect();
    let simulation = rust_files().into_iter().filter(|file| file.starts_with("tests/simulation/src"));
    report(&simulated::check(&methods, &simulation.map(|file| code(&read(&file))).collect::<String>()));
}

/// rustdoc lists methods in the order of the modules that have them, and of their lines in it.
#[test]
fn open_fetch_and_store_come_first_on_the_page_of_a_cache() {
    let cache = read(Path::new("src/cache/mod.rs"));
    let first = cache.lines().find_map(|line| line.strip_prefix("mod ")?.strip_suffix(';')).expect("a module");
    let methods = face::methods(&read(Path::new(&format!("src/cache/{first}.rs"))), "Cache");
    let names: Vec<&str> = methods.iter().take(3).map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["open", "fetch", "store"], "the first methods in src/cache/{first}.rs");
}

#[test]
fn imports_go_one_way() {
    let is_shipped = |file: &&PathBuf| {
        let tests = ["tests", "model"].iter().any(|name| file.with_extension("").iter().any(|part| part == *name));
        file.starts_with("src") && !tests
    };
    // From a file beside the root's, `super` is the root.
    let of_root = |file: &PathBuf| match file.iter().count() {
        2 => code(&read(file)).replace("super::", "crate::"),
        _ => code(&read(file)),
    };
    let files = rust_files();
    report(&files.iter().filter(is_shipped).flat_map(|file| layers::check(file, &of_root(file))).collect::<Vec<_>>());
}

#[test]
fn pages_are_short_and_name_files_that_are_there() {
    let tree = tree();
    let is_page = |file: &&PathBuf| {
        let ours = ["docs", "README.md", "CONTRIBUTING.md", "SECURITY.md"].iter().any(|place| file.starts_with(place));
        ours && file.extension().is_some_and(|ext| ext == "md")
    };
    let mut wrong = Vec::new();
    for file in tree.iter().filter(is_page) {
        let page = read(file);
        wrong.extend(file.strip_prefix("docs").ok().and_then(|name| pages::check_length(name.to_str()?, &page)));
        let hidden = pages::hidden(&page);
        wrong.extend(hidden.iter().map(|line| format!("{}: a reader sees and copies '{line}'", file.display())));
        let missing = pages::missing(&page, &tree);
        wrong.extend(missing.iter().map(|name| format!("{}: there is no file {name}", file.display())));
    }
    report(&wrong);
    let limited = pages::KIB_MAX.iter().filter(|(name, _)| tree.contains(&Path::new("docs").join(name))).count();
    assert_eq!(limited, pages::KIB_MAX.len(), "pages with a limit");
}

fn report(findings: &[String]) {
    assert!(findings.is_empty(), "{} places to mend:\n{}", findings.len(), findings.join("\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &Path) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn rust_files() -> Vec<PathBuf> {
    tree().into_iter().filter(|file| file.extension().is_some_and(|ext| ext == "rs")).collect()
}

/// The public methods of a type in the files of a folder: the file, and what `face::methods` says.
fn methods(folder: &str, of: &str) -> Vec<(PathBuf, (String, bool))> {
    let files = rust_files().into_iter().filter(|file| file.starts_with(folder));
    files.flat_map(|file| face::methods(&read(&file), of).into_iter().map(move |found| (file.clone(), found))).collect()
}

/// Files of the project, relative to its root: what git tracks or would track, or all that is not hidden and not built
/// where the tree is no git checkout.
fn tree() -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .ok()
        .filter(|output| output.status.success() && !output.stdout.is_empty());
    let mut files: Vec<PathBuf> = match listed {
        Some(output) => String::from_utf8_lossy(&output.stdout).split_terminator('\0').map(PathBuf::from).collect(),
        None => walk(Path::new("")),
    };
    // Deleted, but not yet from git's list.
    files.retain(|file| root().join(file).is_file());
    files.sort();
    files
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(root().join(folder)).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    let shown = names.filter(|name| name != "target" && !name.to_string_lossy().starts_with('.'));
    let paths = shown.map(|name| folder.join(name));
    paths.flat_map(|path| if root().join(&path).is_dir() { walk(&path) } else { vec![path] }).collect()
}
