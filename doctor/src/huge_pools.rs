//! How the pool of an engine comes to lie in huge pages. glibc's tunable does not help: no engine's pool is malloc's.

/// The advice for versions of an engine from one on.
struct Advice {
    engine: &'static str,
    /// The first version that it is for.
    since: [u32; 3],
    text: &'static str,
}

/// The newest version of an engine first.
const ALL: [Advice; 3] = [
    Advice { engine: "sglang", since: [0, 5, 23], text: "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS=8" },
    Advice { engine: "sglang", since: [0, 0, 0], text: "SGLANG_HUGEPAGE_SIZE=2MB and vm.nr_hugepages for the pool" },
    Advice { engine: "vllm", since: [0, 0, 0], text: "mount -o remount,huge=advise /dev/shm before vLLM starts" },
];

/// What puts the pool of this version of an engine into huge pages. An unknown version, such as that of a build from
/// source (`0.0.0.dev1+g0123abc`), is taken for a new one.
pub fn huge_pool_advice(engine: &str, version: &str) -> Option<&'static str> {
    let mut numbers = version.split(['.', '+']).map_while(|part| part.parse::<u32>().ok());
    let known = numbers.next().map(|major| [major, numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)]);
    let known = known.filter(|known| *known != [0; 3] && !version.contains("dev"));
    let fits = |advice: &&Advice| advice.engine == engine && known.is_none_or(|known| known >= advice.since);
    ALL.iter().find(fits).map(|advice| advice.text)
}

/// The advice for every engine, in one line.
pub(crate) fn all() -> String {
    let of = |advice: &Advice| {
        let [major, minor, patch] = advice.since;
        let since = if advice.since == [0; 3] { String::new() } else { format!(" {major}.{minor}.{patch}") };
        format!("{}{since}: {}", advice.engine, advice.text)
    };
    format!("for an engine's pool to lie in them: {}", ALL.iter().map(of).collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_of_an_engine_has_its_own_advice() {
        let threads = Some("SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS=8");
        for new in ["0.5.23", "0.5.23.post1", "0.6", "1.0.0", "unknown", "", "0", "0.0.0.dev1+g0123abc", "0.5.17.dev3"]
        {
            assert_eq!(huge_pool_advice("sglang", new), threads, "{new}");
        }
        for old in ["0.5.17", "0.5.22", "0.4"] {
            let advice = huge_pool_advice("sglang", old).expect("advice");
            assert!(advice.starts_with("SGLANG_HUGEPAGE_SIZE=2MB"), "{old}: {advice}");
        }
        assert!(huge_pool_advice("vllm", "0.33.0").is_some_and(|advice| advice.contains("/dev/shm")));
        assert_eq!(huge_pool_advice("other", "1"), None);
        assert!(all().contains("sglang 0.5.23: ") && all().contains("vllm: ") && !all().contains("GLIBC_TUNABLES"));
    }
}
