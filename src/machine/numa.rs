//! The NUMA nodes of drives, and the processors near them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    drives::{STACK_MAX, drive_folder, metadata, parts},
    kernel::Kernel,
};

/// The NUMA node that drives are attached to, on a machine with several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NearNode {
    /// Its number.
    pub node: u32,
    /// Numbers of the node's processors.
    pub processors: Vec<usize>,
}

/// The node near the drives of all paths. `None` if the machine has one node, if the drives are on several, or if the
/// kernel does not tell.
pub(crate) fn near_node(paths: &[PathBuf]) -> Option<NearNode> {
    near_node_at(paths, &Kernel { root: Path::new("/") })
}

/// As `near_node`, with the kernel's files below another root.
pub fn near_node_at(paths: &[PathBuf], kernel: &Kernel<'_>) -> Option<NearNode> {
    const NODES: &str = "sys/devices/system/node";
    if numbers(&kernel.read(&format!("{NODES}/online"))?).len() < 2 {
        return None;
    }
    let node = |path: &PathBuf| node_of(&drive_folder(&metadata(path)?, kernel)?, kernel, STACK_MAX);
    let node = same(paths.iter().map(node))?;
    let processors = numbers(&kernel.read(&format!("{NODES}/node{node}/cpulist"))?);
    (!processors.is_empty()).then_some(NearNode { node, processors })
}

/// The node of a drive, from its directory in /sys: that of the nearest device above it that has one, or that of all
/// the drives that it is made of.
pub(super) fn node_of(folder: &Path, kernel: &Kernel<'_>, stack_max: usize) -> Option<u32> {
    let parts = parts(folder);
    if !parts.is_empty() {
        let deeper = stack_max.checked_sub(1)?;
        return same(parts.into_iter().map(|part| node_of(&part?, kernel, deeper)));
    }
    let devices = folder.ancestors().take_while(|device| *device != kernel.root);
    devices.filter_map(|device| fs::read_to_string(device.join("numa_node")).ok()).find_map(|text| {
        // -1: the kernel does not know it.
        text.trim().parse().ok()
    })
}

/// The value that all have.
fn same(mut all: impl Iterator<Item = Option<u32>>) -> Option<u32> {
    let first = all.next()??;
    all.all(|other| other == Some(first)).then_some(first)
}

/// The numbers of a list as the kernel writes it: `0-3,8`.
fn numbers(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // More processors than any kernel has: not a list of processors.
        (last < 1 << 16).then_some(first..=last)
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::{super::drives::drives_at, *};

    /// A made-up /sys in which the temporary directory lies on a drive below the PCI device `device`.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(nodes: &str, numa_node: &str) -> Self {
            let machine = Machine(tempfile::tempdir().expect("a directory"));
            let number = fs::metadata(machine.0.path()).expect("there").dev();
            machine.write("sys/devices/system/node/online", nodes);
            machine.write("sys/devices/system/node/node0/cpulist", "0-1\n");
            machine.write("sys/devices/system/node/node1/cpulist", "2-3,6\n");
            machine.write("sys/devices/system/node/node2/cpulist", "\n");
            machine.write("sys/devices/pci0/0000:04/numa_node", numa_node);
            machine.write("sys/devices/pci0/0000:04/nvme/nvme0/nvme0n1/queue/rotational", "0");
            machine.link(&number, "sys/devices/pci0/0000:04/nvme/nvme0/nvme0n1");
            machine
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.0.path().join(name);
            fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
            fs::write(path, text).expect("written");
        }

        fn link(&self, number: &u64, to: &str) {
            let (major, minor) = (libc::major(*number), libc::minor(*number));
            let link = self.0.path().join(format!("sys/dev/block/{major}:{minor}"));
            fs::create_dir_all(link.parent().expect("below the root")).expect("a directory");
            let _ = fs::remove_file(&link);
            symlink(self.0.path().join(to), link).expect("a link");
        }

        fn near(&self) -> Option<NearNode> {
            let root = self.0.path().canonicalize().expect("there");
            near_node_at(&[self.0.path().to_owned(), root.clone()], &Kernel { root: &root })
        }
    }

    #[test]
    fn the_node_of_the_device_above_the_drive_is_near() {
        let near = Machine::new("0-1", "1\n").near();
        assert_eq!(near, Some(NearNode { node: 1, processors: vec![2, 3, 6] }));
    }

    #[test]
    fn one_node_an_unknown_node_and_a_node_without_processors_are_none() {
        assert_eq!(Machine::new("0", "1\n").near(), None);
        assert_eq!(Machine::new("0-1", "-1\n").near(), None);
        assert_eq!(Machine::new("0-2", "2\n").near(), None);
        assert_eq!(Machine::new("0-1", "no number").near(), None);
    }

    #[test]
    fn an_array_has_the_node_that_all_its_drives_have() {
        let machine = Machine::new("0-1", "1\n");
        let root = machine.0.path();
        let number = fs::metadata(root).expect("there").dev();
        machine.write("sys/devices/virtual/block/md0/queue/rotational", "0");
        machine.write("sys/devices/pci0/0000:05/numa_node", "1");
        machine.write("sys/devices/pci0/0000:05/nvme1n1/queue/rotational", "0");
        fs::create_dir_all(root.join("sys/devices/virtual/block/md0/slaves")).expect("a directory");
        for (name, drive) in
            [("a", "sys/devices/pci0/0000:04/nvme/nvme0/nvme0n1"), ("b", "sys/devices/pci0/0000:05/nvme1n1")]
        {
            symlink(root.join(drive), root.join("sys/devices/virtual/block/md0/slaves").join(name)).expect("a link");
        }
        machine.link(&number, "sys/devices/virtual/block/md0");
        assert_eq!(machine.near().map(|near| near.node), Some(1));
        machine.write("sys/devices/pci0/0000:05/numa_node", "0");
        assert_eq!(machine.near(), None, "its drives are on two nodes");
    }

    #[test]
    fn each_drive_of_an_array_counts_once_and_what_the_kernel_does_not_tell_is_unknown() {
        let machine = Machine::new("0", "0");
        let root = machine.0.path().canonicalize().expect("there");
        let drives = |paths: &[&Path]| {
            let paths: Vec<_> = paths.iter().map(|path| (*path).to_owned()).collect();
            drives_at(&paths, &Kernel { root: &root })
        };
        assert_eq!(drives(&[&root, machine.0.path()]), Some(1), "two paths on one drive");

        // A volume on an array of two partitions and a drive.
        let blocks = root.join("sys/devices/virtual/block");
        for (name, parts) in [("dm-0", &["md0"][..]), ("md0", &["nvme1n1/nvme1n1p1", "nvme2n1/nvme2n1p3", "nvme3n1"])] {
            machine.write(&format!("sys/devices/virtual/block/{name}/queue/rotational"), "0");
            let folder = blocks.join(name).join("slaves");
            fs::create_dir_all(&folder).expect("a directory");
            for part in parts {
                let drive = part.split('/').next().expect("a name");
                machine.write(&format!("sys/devices/virtual/block/{drive}/queue/rotational"), "0");
                fs::create_dir_all(blocks.join(part)).expect("a directory");
                symlink(blocks.join(part), folder.join(drive)).expect("a link");
            }
        }
        let number = fs::metadata(&root).expect("there").dev();
        machine.link(&number, "sys/devices/virtual/block/dm-0");
        assert_eq!(drives(&[&root]), Some(3));

        assert_eq!(drives(&[&root, Path::new("/proc")]), None, "no drive");
        assert_eq!(drives(&[&root.join("missing")]), Some(3), "a file to be created");
        assert_eq!(drives(&[&root.join("missing/too")]), None);
        fs::remove_dir_all(blocks.join("nvme3n1")).expect("removed");
        assert_eq!(drives(&[&root]), None, "a part without a directory");
    }

    #[test]
    fn lists_of_numbers_are_read_as_the_kernel_writes_them() {
        assert_eq!(numbers("0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8]);
        assert!(numbers("").is_empty());
        assert_eq!(numbers("x,3-1,0-99999999999,4"), [4]);
    }
}
