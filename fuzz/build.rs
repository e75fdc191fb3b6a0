//! Takes the comparisons of `mover_ops` from libFuzzer.
//!
//! It remembers the operands of every comparison, to put them into inputs. That took a quarter of the time of a target
//! whose inputs are choices: no comparison of a cache shows what to choose.

const KINDS: [&str; 9] =
    ["cmp1", "cmp2", "cmp4", "cmp8", "const_cmp1", "const_cmp2", "const_cmp4", "const_cmp8", "switch"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for kind in KINDS {
        println!("cargo::rustc-link-arg-bin=mover_ops=-Wl,--wrap=__sanitizer_cov_trace_{kind}");
    }
}
