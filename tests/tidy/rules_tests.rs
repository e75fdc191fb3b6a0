//! Every rule catches what it is for, and nothing else.

use super::*;

/// Lines (from 1) at which `text`, as `file`, breaks a rule.
fn lines(file: &str, text: &str) -> Vec<usize> {
    check_rust(file.as_ref(), text, false).iter().map(|finding| finding.line).collect()
}

#[test]
fn unsafe_needs_its_reason_directly_above() {
    let bad = [
        ("unsafe { f() }", 1),
        ("let x = unsafe { f() };", 1),
        ("// SAFETY: far\n\nunsafe { f() }", 3),
        ("// SAFETY: for another\ng();\nunsafe { f() }", 3),
        ("// SAFETY: for the first\nunsafe { f() };\nunsafe { g() }", 3),
        ("// safe, trust me\nunsafe { f() }", 2),
        ("unsafe impl Send for X {}", 1),
        ("/// Docs.\nunsafe fn f() {}", 2),
        ("/// Docs.\npub(crate) unsafe extern \"C\" fn f() {}", 2),
        ("unsafe trait T {}", 1),
        ("impl X {\n    unsafe fn f() {}\n}", 2),
        ("impl T for X {}\nunsafe fn f() {}", 2),
        ("impl T for X {\n    unsafe fn f() {\n        unsafe { g() }\n    }\n}", 3),
        ("unsafe extern \"C\" {", 1),
        ("f(\"// SAFETY: in a string\");\nunsafe { f() }", 2),
        ("let g = move || unsafe\n{ f() };", 1),
        ("match x {\n    // SAFETY: the other arm\n    A => 1,\n    B => unsafe { f() },\n}", 4),
    ];
    for (text, line) in bad {
        assert_eq!(lines("src/a.rs", text), [line], "{text}");
        assert_eq!(lines("benches/a.rs", text), [line], "in benches too: {text}");
    }
    let good = [
        "// SAFETY: why\nunsafe { f() }",
        "// SAFETY: why,\n// in two lines\nlet x = unsafe { f() };",
        "// SAFETY: why\nlet x =\n    unsafe { f() };",
        "// SAFETY: why\nlet x = g(1)\n    .map(|y| unsafe { f(y) });",
        "// SAFETY: why\n#[cfg(unix)]\nunsafe impl Send for X {}",
        "/// Docs.\n///\n/// # Safety\n/// The caller's.\n#[inline]\npub unsafe fn f() {}",
        "// SAFETY: as the trait says\nunsafe fn f() {}",
        "impl T for X {\n    fn e() {}\n\n    unsafe fn f() {}\n}",
        "impl<A> T<A> for X\nwhere\n    A: B,\n{\n    unsafe fn f() {}\n}",
        "type F = unsafe fn(u32) -> u32;\ntype G = unsafe extern \"C\" fn(u32);",
        "// SAFETY: the library's header\nunsafe extern \"C\" {}",
        "// unsafe { in a comment }\nlet unsafe_block = \"unsafe { in a string }\";",
        "#![deny(unsafe_op_in_unsafe_fn)]",
    ];
    for text in good {
        assert_eq!(lines("src/a.rs", text), [0; 0], "{text}");
    }
}

#[test]
fn unfinished_code_is_found_everywhere() {
    for name in ["dbg!(x)", "todo!()", "unimplemented!()", "std::todo!()"] {
        assert_eq!(lines("src/a.rs", name), [1], "{name}");
        assert_eq!(lines("tests/a.rs", name), [1], "{name}");
        assert_eq!(lines("src/a.rs", &format!("// {name}\nf(\"{name}\");")), [0; 0], "{name}");
    }
    assert_eq!(lines("src/a.rs", "my_todo!()"), [0; 0]);
}

#[test]
fn the_library_neither_prints_nor_unwraps() {
    for text in ["println!()", "eprintln!()", "print!()", "eprint!()", "x.unwrap();"] {
        assert_eq!(lines("src/a.rs", text), [1], "{text}");
        let tests = format!("#[cfg(test)]\nmod tests {{\n    fn f() {{ {text} }}\n}}\n");
        assert_eq!(lines("src/a.rs", &tests), [0; 0], "{text}");
        assert_eq!(lines("src/a.rs", &format!("{tests}fn g() {{\n    {text}\n}}")), [6], "after the tests: {text}");
        assert_eq!(lines("tests/a.rs", text), [0; 0], "{text}");
        assert_eq!(check_rust("src/a.rs".as_ref(), text, true), [], "{text}");
    }
    assert_eq!(lines("cli/src/a.rs", "println!()"), [0; 0], "the command prints");
    assert_eq!(lines("cli/src/a.rs", "x.unwrap()"), [1]);
    assert_eq!(lines("src/a.rs", "x.unwrap_or(1)"), [0; 0]);
    assert_eq!(lines("src/a.rs", "/// x.unwrap()\nfn f() {}"), [0; 0]);
    assert_eq!(
        lines("src/a.rs", "#[cfg(test)]\nuse x;\nfn f() { x.unwrap() }"),
        [3],
        "the item ends with its semicolon"
    );
}

#[test]
fn lines_and_files_have_a_limit() {
    let line = |chars| "é".repeat(chars);
    assert_eq!(lines("benches/a.rs", &line(LINE_CHARS_MAX)), [0; 0]);
    assert_eq!(lines("benches/a.rs", &format!("\n{}", line(LINE_CHARS_MAX + 1))), [2]);
    assert_eq!(lines("benches/a.rs", &format!("// https://{}", line(LINE_CHARS_MAX))), [0; 0]);
    let long = "\n".repeat(LINES_MAX + 1);
    assert_eq!(lines("src/a.rs", &long[1..]), [0; 0]);
    for file in ["src/a.rs", "tests/a.rs"] {
        assert_eq!(lines(file, &long), [LINES_MAX + 1]);
        assert_eq!(lines(file, &format!("{LONG}one table.{long}")), [0; 0]);
        assert_eq!(lines(file, &format!("{LONG}{long}")), [LINES_MAX + 1], "no reason");
    }
}

#[test]
fn test_modules_in_files_of_their_own_are_test_code() {
    let mut tests_only = BTreeSet::new();
    tests_only.extend(test_modules("src/index/mod.rs".as_ref(), "#[cfg(test)]\nmod tests;\nmod lru;"));
    tests_only.extend(test_modules("src/cache.rs".as_ref(), "#[cfg(all(test, unix))]\npub(crate) mod model;"));
    let is_test = |file: &str| is_test_code(file.as_ref(), &tests_only);
    assert!(is_test("src/index/tests.rs") && is_test("src/index/tests/chain.rs") && is_test("src/cache/model.rs"));
    assert!(!is_test("src/index/lru.rs") && !is_test("src/index/mod.rs") && !is_test("src/tests.rs"));
    assert!(is_test("tests/any.rs") && is_test("benches/any.rs") && !is_test("cli/src/main.rs"));
}

#[test]
fn paths_of_one_machine_are_found() {
    let found = |text: &str| check_text("a.md".as_ref(), text).iter().map(|finding| finding.line).collect::<Vec<_>>();
    let (folder, home) = (concat!("/wo", "rk"), concat!("/ro", "ot"));
    for text in [
        format!("see {folder}/shared/x.md"),
        format!("cd {folder}"),
        format!("`{folder}/x`"),
        format!("path=\"{home}/.cargo\""),
        format!("({folder})"),
        format!("x={folder}:y"),
    ] {
        assert_eq!(found(&format!("fine\n{text}")), [2], "{text}");
    }
    for text in
        ["/workspace", "./work/x", ".github/workflows", "my/work/x", "/work.d", "https://a.b/work/x", "$DIR/root/x"]
    {
        assert_eq!(found(text), [0; 0], "{text}");
    }
    assert_eq!(found(&format!("index = https://crates{}x", concat!(".inter", "nal/"))), [1]);
}

#[test]
fn a_lock_file_names_the_public_registry_only() {
    let lock = "[[package]]\nsource = \"registry+https://github.com/rust-lang/crates.io-index\"\n\
                source = \"registry+https://mirror.example/index\"\nsource = \"git+https://example.org/x\"\n";
    let findings = check_lock("Cargo.lock".as_ref(), lock);
    assert!(findings.iter().map(|finding| finding.line).eq([3, 4]), "{findings:?}");
    assert!(findings[0].to_string().starts_with("Cargo.lock:3: found source = "), "{}", findings[0]);
}
