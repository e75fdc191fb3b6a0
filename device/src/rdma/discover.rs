//! Finds the RDMA devices of this machine and says why a device cannot be used.

use std::{ffi::CStr, fmt, sync::Arc};

use kvhoist_base::error::{self, Error};

use super::{
    library::Library,
    ports::{self, LoopbackPath, Port},
    sysfs::{self, Distance},
    verbs::{Context, DeviceLimits},
};

/// The RDMA devices of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovery {
    /// Whether libibverbs can register memory by dma-buf, or why libibverbs could not be loaded.
    pub library: Result<bool, String>,
    /// The devices that libibverbs shows to this process.
    pub devices: Vec<Device>,
}

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// PCI address, such as `0000:9b:00.0`; `None` for a software device.
    pub pci_address: Option<String>,
    /// NUMA node of the device, if the kernel reports one.
    pub numa_node: Option<u32>,
    /// Largest number of work requests in a queue.
    pub work_requests_max: u32,
    /// Ports of the device.
    #[doc(hidden)]
    pub ports: Vec<Port>,
    /// The error of the query, if the device or one of its ports could not be queried.
    pub fault: Option<String>,
}

impl Device {
    /// Distance from the PCI device at this address.
    #[doc(hidden)]
    pub fn distance_to(&self, pci_address: &str) -> Distance {
        self.pci_address.as_deref().map_or(Distance::Unknown, |own| sysfs::distance(own, pci_address))
    }

    /// Why the device cannot copy through its own loopback; `None` if it can. One of its ports needs a path back to
    /// itself.
    pub fn obstacle(&self) -> Option<String> {
        self.path().err()
    }

    /// The loopback path of the first port that has one.
    pub(crate) fn path(&self) -> Result<LoopbackPath, String> {
        let mut reason = self.fault.clone();
        for port in &self.ports {
            match port.path() {
                Ok(path) => return Ok(path),
                Err(refused) => reason = reason.or(Some(refused)),
            }
        }
        Err(reason.unwrap_or_else(|| "it has no ports".into()))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        match &self.pci_address {
            Some(address) => write!(f, " ({address})"),
            None => f.write_str(" (software)"),
        }
    }
}

impl Discovery {
    /// Picks the device to copy through: the device called `name`, or else the usable device nearest to the GPU at PCI
    /// address `gpu`. The error lists the devices that exist and says what to do.
    pub fn choose(&self, name: Option<&str>, gpu: Option<&str>) -> Result<&Device, String> {
        if let Err(reason) = &self.library {
            return Err(reason.clone());
        }
        let names = || self.devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ");
        if let Some(name) = name {
            let found = self.devices.iter().find(|device| device.name == name);
            let device = found.ok_or_else(|| match self.devices.len() {
                0 => format!("no RDMA device {name}: there is none at all"),
                _ => format!("no RDMA device {name}; there is {}", names()),
            })?;
            return device.obstacle().map_or(Ok(device), |reason| Err(format!("{name}: {reason}")));
        }
        let distance = |device: &&Device| gpu.map_or(Distance::Unknown, |gpu| device.distance_to(gpu));
        let usable = self.devices.iter().filter(|device| device.obstacle().is_none());
        usable.min_by_key(distance).ok_or_else(|| {
            if self.devices.is_empty() {
                return "no RDMA device (none in /sys/class/infiniband that this process may use); install a NIC and \
                        its driver, and in a container pass /dev/infiniband on"
                    .into();
            }
            let reason = |device: &Device| format!("{}: {}", device.name, device.obstacle().unwrap_or_default());
            self.devices.iter().map(reason).collect::<Vec<_>>().join("; ")
        })
    }
}

impl Device {
    /// The RDMA devices that libibverbs shows to this process. Loads the library and opens each device for its query,
    /// which takes milliseconds.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason why libibverbs could not be loaded.
    ///
    /// ```
    /// match kvhoist::rdma::Device::all() {
    ///     Ok(devices) => devices.iter().for_each(|device| println!("{device}: {:?}", device.obstacle())),
    ///     Err(error) => println!("{error}"),
    /// }
    /// ```
    pub fn all() -> error::Result<Vec<Self>> {
        let Discovery { library, devices } = discover();
        library.map(|_| devices).map_err(|reason| Error::unavailable("gdr", reason))
    }
}

/// Loads libibverbs and queries its devices; each is open only during its query. Takes milliseconds.
pub fn discover() -> Discovery {
    let library = match Library::get() {
        Ok(library) => library,
        Err(reason) => return Discovery { library: Err(reason), devices: Vec::new() },
    };
    let mut devices = Vec::new();
    each(library, |name, open| {
        devices.push(describe(name, open));
        false
    });
    Discovery { library: Ok(library.has_dma_buf()), devices }
}

/// Opens the device with this name.
pub(crate) fn open(name: &str) -> Result<(Arc<Context>, DeviceLimits), String> {
    let library = Library::get()?;
    let mut opened = Err(format!("no RDMA device {name}: it has disappeared since it was listed"));
    each(library, |other, open| {
        let found = other == name;
        if found {
            opened = open();
        }
        found
    });
    let context = opened?;
    let limits = context.limits().map_err(|fault| fault.to_string())?;
    Ok((context, limits))
}

type Open<'a> = &'a dyn Fn() -> Result<Arc<Context>, String>;

/// Calls `visit` for each device until it returns true.
fn each(library: &'static Library, mut visit: impl FnMut(&str, Open<'_>) -> bool) {
    let mut count = 0;
    // SAFETY: returns the library's null-terminated device list and writes its length; freed below.
    let list = unsafe { (library.functions.get_device_list)(&mut count) };
    if list.is_null() {
        return;
    }
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: `at` is below the length of the list.
        let device = unsafe { *list.add(at) };
        // SAFETY: a device of the list; its name is a C string that lives as long as the list.
        let name = unsafe { CStr::from_ptr((library.functions.get_device_name)(device)) };
        let open = || Context::open(library, device).map_err(|fault| fault.to_string());
        if visit(&name.to_string_lossy(), &open) {
            break;
        }
    }
    // SAFETY: the list from above; freeing it leaves opened devices open.
    unsafe { (library.functions.free_device_list)(list) };
}

fn describe(name: &str, open: Open<'_>) -> Device {
    let pci_address = sysfs::pci_address(name);
    let numa_node = pci_address.as_deref().and_then(sysfs::numa_node);
    let mut device =
        Device { name: name.to_owned(), pci_address, numa_node, work_requests_max: 0, ports: vec![], fault: None };
    let queried = open().and_then(|context| {
        let limits = context.limits().map_err(|fault| fault.to_string())?;
        device.work_requests_max = limits.work_requests;
        for number in 1..=limits.ports {
            match ports::query(&context, name, number) {
                Ok(port) => device.ports.push(port),
                Err(reason) => device.fault = Some(reason),
            }
        }
        Ok(())
    });
    if let Err(reason) = queried {
        device.fault = Some(reason);
    }
    device
}
