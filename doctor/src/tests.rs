//! Tests over made-up machines.

use std::{fs, path::PathBuf};

use super::*;

/// A directory with the kernel's files of a machine with 64 GiB and no troubles.
fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    let sound = [
        ("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable:   33554432 kB"),
        ("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes"),
        ("proc/self/status", "Name: a\nCapEff:\t0000000000000000\nSeccomp:\t0"),
        ("proc/self/cgroup", "0::/"),
        ("proc/sys/kernel/osrelease", "6.8.0-31-generic"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"),
    ];
    for (name, text) in sound.iter().chain(files) {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        fs::write(path, text).expect("written");
    }
    root
}

fn plan(ranks: u32, host_bytes: u64) -> Plan {
    Plan { ranks, paths: Vec::new(), host_bytes, write_bytes_a_day: 0, takes_files: false }
}

fn planned(paths: &[PathBuf], bytes: u64) -> Vec<PlannedPath> {
    paths.iter().map(|path| PlannedPath { path: path.clone(), at: path.clone(), bytes }).collect()
}

/// The troubles of a plan on such a machine, with their fixes.
fn troubles(plan: &Plan, files: &[(&str, &str)]) -> Vec<(&'static str, String)> {
    let root = machine(files);
    let all = examine_at(plan, root.path());
    let troubles = all.into_iter().filter(|finding| finding.is_trouble);
    troubles.map(|it| (it.what, format!("{} -> {}", it.found, it.fix.expect("every trouble has a fix")))).collect()
}

#[test]
fn a_sound_machine_has_no_troubles_and_each_limit_is_one() {
    let enough = plan(4, 8 << 30);
    assert_eq!(troubles(&enough, &[]), []);
    let limits = "Max locked memory         8388608              8388608              bytes";
    let cases: [(&Plan, &str, &str, &str, &str); 9] = [
        (&plan(8, 8 << 30), "proc/uptime", "", "memory", "32.0 GiB available of 64.0 GiB; 64.0 GiB are configured"),
        (&plan(8, 8 << 30), "proc/uptime", "", "memory", "-> lower host_bytes to 4.0 GiB a rank, or free memory"),
        (
            &enough,
            "sys/fs/cgroup/memory.max",
            "17179869184",
            "memory limit",
            "limit of 16.0 GiB are left in the cgroup /",
        ),
        (&enough, "proc/self/limits", limits, "locked memory", "the limit is 8.0 MiB, and all ranks register 32.0 GiB"),
        (&enough, "proc/sys/kernel/osrelease", "5.15.0-1", "kernel", "Linux 5.19 or later"),
        (&enough, "proc/sys/kernel/io_uring_disabled", "2", "kernel", "sysctl -w kernel.io_uring_disabled=0"),
        (&enough, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "huge pages", "echo madvise"),
        (&enough, "sys/fs/cgroup/memory/memory.limit_in_bytes", "5", "", ""),
        (&plan(0, 0), "sys/fs/cgroup/memory.max", "1", "", ""),
    ];
    for (plan, file, text, what, said) in cases {
        match &troubles(plan, &[(file, text)])[..] {
            [] => assert_eq!(what, "", "{file}"),
            [(found, words)] => assert!(*found == what && words.contains(said), "{file}: {words}"),
            more => panic!("{file}: {more:?}"),
        }
    }
    // CAP_IPC_LOCK lifts the limit.
    let exempt = [("proc/self/limits", limits), ("proc/self/status", "CapEff:\t0000000000004000")];
    assert_eq!(troubles(&enough, &exempt), []);
}

#[test]
fn the_tightest_cgroup_above_the_process_counts() {
    let (deep, above) = ("sys/fs/cgroup/pods/engine/memory.max", "sys/fs/cgroup/pods/memory.max");
    let used = ("sys/fs/cgroup/pods/memory.current", "1073741824");
    let files = [("proc/self/cgroup", "0::/pods/engine"), (deep, "max"), (above, "2147483648"), used];
    let found = troubles(&plan(2, 1 << 30), &files);
    assert!(found.len() == 1 && found[0].1.contains("1.0 GiB of the limit of 2.0 GiB"), "{found:?}");
    assert_eq!(troubles(&plan(1, 1 << 30), &files), []);
    // Files that the kernel keeps in memory give way.
    for stat in ["inactive_file 536870912\nactive_file 536870912", "total_active_file 1073741824\nactive_file 1"] {
        let files = [&files[..], &[("sys/fs/cgroup/pods/memory.stat", stat)]].concat();
        assert_eq!(troubles(&plan(2, 1 << 30), &files), [], "{stat}");
    }
    // The lowest limit may be of another than the one with the least left.
    let full = [(deep, "1610612736"), ("sys/fs/cgroup/pods/memory.current", "2147483648")];
    let root = machine(&[&files[..], &full].concat());
    assert_eq!(limits::memory_bytes(&Kernel { root: root.path() }), Some(1_610_612_736));
    let found = troubles(&plan(1, 1 << 30), &[&files[..], &full].concat());
    assert!(found.len() == 1 && found[0].1.contains("0 bytes of the limit of 2.0 GiB"), "{found:?}");
    let old =
        [("proc/self/cgroup", "4:cpu:/x\n3:memory,misc:/x"), ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "4096")];
    assert_eq!(troubles(&plan(1, 1 << 30), &old).len(), 1);
}

#[test]
fn space_is_summed_over_the_paths_and_ranks_of_a_file_system() {
    let (root, dir) = (machine(&[]), tempfile::tempdir().expect("a directory"));
    let paths: Vec<PathBuf> = ["a", "b"].iter().map(|name| dir.path().join(name)).collect();
    paths.iter().for_each(|path| fs::create_dir(path).expect("made"));
    let (free, size) = places::free_bytes(dir.path()).expect("a file system");
    let usable = free - size / 100;
    let space = |ranks, disk_bytes| {
        let plan = Plan { paths: planned(&paths, disk_bytes / 2), ..plan(ranks, 0) };
        let all = examine_at(&plan, root.path());
        all.into_iter().find(|finding| finding.what == "space").expect("one for the file system")
    };
    // Others use the disk meanwhile: far from the edge.
    assert!(!space(2, usable / 4).is_trouble && !space(1, usable / 2).is_trouble);
    let full = space(8, usable / 4);
    assert!(full.is_trouble && full.found.contains("8 rank(s), 2 of 2 path(s)"), "{full:?}");
    assert!(full.fix.expect("a fix").starts_with("lower capacity to "));
    let mut store = fs::File::create(paths[1].join("kvhoist.store")).expect("a store");
    std::io::Write::write_all(&mut store, &vec![1; 3 << 20]).expect("written");
    store.sync_all().expect("allocated");
    assert!(space(1, 1 << 20).found.contains("(3.0 MiB of them in stores that are there)"), "{:?}", space(1, 1 << 20));
    let file = Plan { paths: planned(&[paths[1].join("kvhoist.store")], 1 << 20), takes_files: true, ..plan(1, 0) };
    let all = examine_at(&file, root.path());
    assert!(all.iter().any(|finding| finding.found.contains("(3.0 MiB of them")), "a path that is a file: {all:?}");
    // Of others, beside a path that will be made.
    let made = PlannedPath { path: dir.path().join("new"), at: dir.path().into(), bytes: 1 << 20 };
    let all = examine_at(&Plan { paths: vec![made], ..plan(1, 0) }, root.path());
    let space = all.iter().find(|finding| finding.what == "space").expect("one for the file system");
    assert!(!space.found.contains("in stores that are there"), "{space:?}");
    // Each path has a size of its own.
    let mut uneven = planned(&paths, usable / 4);
    uneven[0].bytes = usable * 2;
    let all = examine_at(&Plan { paths: uneven, ..plan(1, 0) }, root.path());
    let space = all.iter().find(|finding| finding.what == "space").expect("one for the file system");
    assert!(space.is_trouble, "{space:?}");
}

#[test]
fn a_path_that_is_missing_or_not_mounted_is_never_looked_for_above() {
    let dir = tempfile::tempdir().expect("a directory");
    let (there, missing) = (dir.path().join("there"), dir.path().join("mnt/nvme/kv"));
    fs::create_dir(&there).expect("made");
    let point = dir.path().join("mnt/nvme");
    let mounts = |kind: &str, options: &str| {
        let at = dir.path().canonicalize().expect("there");
        format!("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / {} {options},noatime - {kind} src rw", at.display())
    };
    let fstab =
        format!("# a comment\n/dev/nvme9n1 {} ext4 defaults 0 2\n/dev/sda1 / ext4 defaults 0 1", point.display());
    let of = |path: &Path, files: &[(&str, &str)]| {
        troubles(&Plan { paths: planned(&[path.into()], 1 << 60), ..plan(1, 0) }, files)
    };
    let found = of(&missing, &[("etc/fstab", &fstab), ("proc/self/mountinfo", &mounts("ext4", "rw"))]);
    assert_eq!(found.iter().map(|it| it.0).collect::<Vec<_>>(), ["mount", "path"], "and no space: {found:?}");
    assert!(found[0].1.ends_with(&format!("-> mount '{}'", point.display())), "{found:?}");
    assert!(found[1].1.contains("mkdir -p -m 700"), "{found:?}");
    let spaced = dir.path().join("a b/nvme");
    let escaped = spaced.display().to_string().replace(' ', "\\040");
    let fstab = format!("/dev/nvme9n1 {escaped} ext4 nofail 0 2");
    let found = of(&spaced.join("kv"), &[("etc/fstab", &fstab), ("proc/self/mountinfo", &mounts("ext4", "rw"))]);
    assert!(found[0].1.ends_with("a b/nvme'"), "{found:?}");
    // Mounted there under another spelling; and what is farther up would hide what is mounted.
    let at = dir.path().canonicalize().expect("there");
    for point in [format!("{}/", at.display()), at.parent().expect("one").display().to_string()] {
        let fstab = format!("/dev/nvme9n1 {point} ext4 nofail 0 2");
        let found = of(&at.join("there"), &[("etc/fstab", &fstab), ("proc/self/mountinfo", &mounts("ext4", "rw"))]);
        assert!(found.iter().all(|it| it.0 != "mount"), "{point}: {found:?}");
    }
    for (kind, options, said) in [
        ("tmpfs", "rw", "take memory"),
        ("overlay", "rw", "docker -v"),
        ("nfs4", "rw", "local drive"),
        ("fuse.sshfs", "rw", "local drive"),
        ("ext4", "ro", "remount,rw"),
    ] {
        let found = of(&there, &[("proc/self/mountinfo", &mounts(kind, options))]);
        assert!(found.len() == 2 && found[0].0 == "path" && found[0].1.contains(said), "{kind}: {found:?}");
    }
}

#[test]
fn the_years_of_a_drive_count_what_all_ranks_may_write_to_it() {
    let wear = DriveWear::new("nvme0n1", 20, 1 << 40, 8766);
    let of = |ranks, write_bytes_a_day| {
        let mut plan =
            Plan { paths: planned(&["/a", "/b"].map(PathBuf::from), 0), write_bytes_a_day, ..plan(ranks, 0) };
        let share = plan.share(|path| path == Path::new("/a"));
        assert_eq!((share, plan.share(|_| true)), (0.5, 1.0), "of two paths of unknown sizes, and of both");
        plan.paths[1].bytes = 3;
        plan.paths[0].bytes = 1;
        assert_eq!(plan.share(|path| path == Path::new("/a")), 0.25);
        worn(&wear, &plan, share)
    };
    // 4 TiB are left. 8 ranks write 4 GiB of it a day: half of all, because the other half goes to the other drive.
    assert!(of(8, 1 << 30).ends_with("2.8 years at the configured 4.0 GiB a day"), "{}", of(8, 1 << 30));
    assert_eq!(of(8, 0), wear.to_string());
}

#[test]
fn the_quick_start_sets_what_the_doctor_advises_for_huge_pages() {
    let advice =
        troubles(&plan(1, 1 << 30), &[("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")]);
    let variable = "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS=8";
    assert!(advice[0].1.contains(variable) && !advice[0].1.contains("GLIBC_TUNABLES"), "{advice:?}");
    for page in [include_str!("../../docs/start/sglang.md"), include_str!("../../docs/sglang.md")] {
        assert!(page.contains(&format!("{variable} python -m sglang.launch_server")));
    }
}
