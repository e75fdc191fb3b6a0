//! Memory and its limits; the kernel's features and restrictions.

use kvhoist::internals::machine::{Kernel, shown};

use crate::{
    huge_pools,
    plan::{Finding, Plan},
};

/// Processes with CAP_IPC_LOCK may lock any amount of memory.
const CAP_IPC_LOCK: u32 = 14;

pub(crate) fn findings(plan: &Plan, kernel: &Kernel<'_>) -> Vec<Finding> {
    let wanted = plan.host_bytes.saturating_mul(plan.ranks.into());
    let mut findings = vec![ring(kernel), huge_pages(kernel)];
    findings.extend(memory(kernel, plan.ranks, wanted));
    findings.push(locked_memory(kernel, wanted));
    findings
}

/// Bytes of a field of /proc/meminfo.
fn meminfo(kernel: &Kernel<'_>, name: &str) -> Option<u64> {
    let rest = kernel.field("proc/meminfo", name)?;
    Some(rest.trim_end_matches("kB").trim().parse::<u64>().ok()? << 10)
}

/// All memory, or the lowest limit of a cgroup.
pub(crate) fn memory_bytes(kernel: &Kernel<'_>) -> Option<u64> {
    let (total, limit) = (meminfo(kernel, "MemTotal:"), cgroups(kernel).into_iter().map(|(_, _, limit)| limit));
    total.into_iter().chain(limit).min()
}

/// Available memory, and what the process's cgroup may still use.
fn memory(kernel: &Kernel<'_>, ranks: u32, wanted: u64) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let (Some(free), Some(total)) = (meminfo(kernel, "MemAvailable:"), meminfo(kernel, "MemTotal:")) {
        let found = format!("{} available of {}", shown(free), shown(total));
        let fix = format!("{}, or free memory: ps aux --sort=-rss | head", lower_to(free, ranks));
        findings.push(compared("memory", found, wanted, free, &fix));
    }
    if let Some((name, left, limit)) = cgroups(kernel).into_iter().min_by_key(|(_, left, _)| *left) {
        let found = format!("{} of the limit of {} are left in the cgroup {name}", shown(left), shown(limit));
        let fix = format!(
            "raise it: docker --memory, resources.limits.memory in Kubernetes, MemoryMax= in systemd; or {}",
            lower_to(left, ranks)
        );
        findings.push(compared("memory limit", found, wanted, left, &fix));
    }
    findings
}

fn lower_to(free: u64, ranks: u32) -> String {
    format!("lower host_bytes to {} a rank", shown(free / u64::from(ranks.max(1))))
}

fn compared(what: &'static str, found: String, wanted: u64, free: u64, fix: &str) -> Finding {
    if wanted == 0 {
        return Finding::note(what, found);
    }
    let found = format!("{found}; {} are configured for the host tiers of all ranks", shown(wanted));
    if wanted > free { Finding::trouble(what, found, fix) } else { Finding::note(what, found) }
}

/// The cgroups, of this process and above it, that limit memory: name, bytes left, limit.
fn cgroups(kernel: &Kernel<'_>) -> Vec<(String, u64, u64)> {
    let memberships = kernel.read("proc/self/cgroup").unwrap_or_default();
    let mut limited = Vec::new();
    for line in memberships.lines() {
        // `0::/a/b` in version 2, `7:memory:/a/b` in version 1.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (folder, limit_file, used_file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max", "memory.current"),
            list if list.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let mut at = path.trim_end_matches('/');
        loop {
            let limit = kernel.number(&format!("{folder}{at}/{limit_file}"));
            let used = kernel.number(&format!("{folder}{at}/{used_file}")).unwrap_or(0);
            let used = used.saturating_sub(cached(kernel, &format!("{folder}{at}/memory.stat")));
            // Version 1 represents "no limit" by the largest number of pages.
            if let Some(limit) = limit.filter(|&limit| limit < 1 << 60) {
                limited.push((if at.is_empty() { "/".into() } else { at.into() }, limit.saturating_sub(used), limit));
            }
            let Some((parent, _)) = at.rsplit_once('/') else { break };
            at = parent;
        }
    }
    limited
}

/// Bytes that a cgroup uses for files and gives up for other use.
fn cached(kernel: &Kernel<'_>, stat: &str) -> u64 {
    let stat = kernel.read(stat).unwrap_or_default();
    // Version 1 has those of the cgroup alone too; `total_` are those with the cgroups below it, as in version 2.
    let of = |name: &str| {
        let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
        stat.lines().find_map(value)
    };
    let file = |kind: &str| of(&format!("total_{kind}_file")).or_else(|| of(&format!("{kind}_file"))).unwrap_or(0u64);
    file("active").saturating_add(file("inactive"))
}

/// What raises the limit on locked memory.
pub const LOCKED_MEMORY_FIX: &str = "ulimit -l unlimited; LimitMEMLOCK=infinity in systemd; docker --ulimit \
                                     memlock=-1; or grant CAP_IPC_LOCK. Without it transfers cost more processor time";

/// Whether the host tiers of all ranks can be registered with a ring: the kernel counts locked memory per user.
fn locked_memory(kernel: &Kernel<'_>, wanted: u64) -> Finding {
    const WHAT: &str = "locked memory";
    let limit = kernel.field("proc/self/limits", "Max locked memory");
    let soft = limit.and_then(|rest| Some(rest.split_whitespace().next()?.to_owned()));
    let exempt = kernel
        .field("proc/self/status", "CapEff:")
        .and_then(|mask| u64::from_str_radix(&mask, 16).ok())
        .is_some_and(|mask| mask & (1 << CAP_IPC_LOCK) != 0);
    let Some(bytes) = soft.as_deref().and_then(|soft| soft.parse::<u64>().ok()) else {
        return Finding::note(WHAT, soft.unwrap_or_else(|| "the limit is not known".into()));
    };
    let found = format!("the limit is {}", shown(bytes));
    if exempt {
        return Finding::note(WHAT, format!("{found}, which does not bind this process (CAP_IPC_LOCK)"));
    }
    match wanted {
        0 => Finding::note(WHAT, found).fix(LOCKED_MEMORY_FIX),
        _ if wanted <= bytes => Finding::note(WHAT, format!("{found}, of {} that all ranks register", shown(wanted))),
        _ => Finding::trouble(WHAT, format!("{found}, and all ranks register {}", shown(wanted)), LOCKED_MEMORY_FIX),
    }
}

/// Restrictions of io_uring by the kernel and the container.
fn ring(kernel: &Kernel<'_>) -> Finding {
    const WHAT: &str = "kernel";
    let release = kernel.read("proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".into());
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let found = format!("Linux {release}");
    if version < (5, 19) {
        return Finding::trouble(WHAT, found, "Linux 5.19 or later, for io_uring; a pool of threads serves until then");
    }
    match kernel.number("proc/sys/kernel/io_uring_disabled") {
        Some(2) => Finding::trouble(
            WHAT,
            format!("{found}, with io_uring disabled for all"),
            "sysctl -w kernel.io_uring_disabled=0 on the host; a pool of threads serves until then",
        ),
        Some(1) => Finding::note(WHAT, format!("{found}, with io_uring for CAP_SYS_ADMIN and one group only"))
            .fix("sysctl -w kernel.io_uring_disabled=0, or kernel.io_uring_group to a group of this user"),
        _ if kernel.field("proc/self/status", "Seccomp:").as_deref() == Some("2") => {
            Finding::note(WHAT, format!("{found}, with system calls filtered (seccomp), as containers have it")).fix(
                "if io_uring is refused: allow io_uring_setup, io_uring_enter and io_uring_register in the profile: \
                      docker --security-opt seccomp=FILE",
            )
        }
        _ => Finding::note(WHAT, found),
    }
}

fn huge_pages(kernel: &Kernel<'_>) -> Finding {
    const WHAT: &str = "huge pages";
    const SWITCH: &str = "sys/kernel/mm/transparent_hugepage/enabled";
    match kernel.read(SWITCH) {
        Some(modes) if modes.contains("[never]") => Finding::trouble(
            WHAT,
            format!("transparent: {modes}; an engine's pool in small pages splits a drive's requests"),
            format!("echo madvise > /{SWITCH}; {}", huge_pools::all()),
        ),
        Some(modes) => Finding::note(WHAT, format!("transparent: {modes}")).fix(huge_pools::all()),
        None => Finding::note(WHAT, "not known to this kernel"),
    }
}
