//! Finds the GPUs of this machine and says why there is none.

use std::{ffi::CStr, fmt};

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUpointer_attribute, CUresult};
use kvhoist_base::error::{self, Error};

use super::driver::{CudaError, Driver, check, has};

/// The GPUs of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovery {
    /// The newest CUDA version that the driver supports (13000 is 13.0), or why there is no driver.
    pub driver: Result<i32, String>,
    /// The devices that CUDA shows to this process.
    pub devices: Vec<Device>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// CUDA's device ordinal (`CUDA_VISIBLE_DEVICES` applies).
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// PCI address: domain, bus, device and function, such as `0000:9b:00.0`.
    pub pci_address: String,
    /// The driver's identifier of the GPU, or of the part of a divided one, in every process; 0 with drivers that have
    /// none (before CUDA 11.4).
    pub uuid: [u8; 16],
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Compute capability, major and minor.
    pub compute: (i32, i32),
    /// Number of multiprocessors.
    pub multiprocessors: i32,
    /// Number of copy engines, which copy while kernels run.
    pub copy_engines: i32,
    /// Whether device memory can be exported as a dma-buf, which GPUDirect RDMA needs.
    pub dma_buf: bool,
    /// Whether the device supports GPUDirect RDMA.
    pub gpu_direct_rdma: bool,
    /// Whether kernels can use host addresses of registered memory.
    pub host_addresses: bool,
}

impl Discovery {
    /// The device with this ordinal. The error says what is there instead.
    pub fn device(&self, ordinal: u32) -> Result<&Device, String> {
        let found = self.devices.iter().find(|device| device.ordinal == ordinal);
        found.ok_or_else(|| match &self.driver {
            Err(reason) => reason.clone(),
            Ok(_) if self.devices.is_empty() => "the driver shows no GPU to this process".into(),
            Ok(_) => format!("the driver shows {} GPUs, numbered from 0", self.devices.len()),
        })
    }
}

impl Discovery {
    /// The device with this identifier. The error says what is there instead.
    pub fn device_of(&self, uuid: &[u8; 16]) -> Result<&Device, String> {
        let found = self.devices.iter().find(|device| device.uuid == *uuid && *uuid != [0; 16]);
        found.ok_or_else(|| {
            let all: Vec<String> = self.devices.iter().map(|device| uuid_text(&device.uuid)).collect();
            let found = match &self.driver {
                Err(reason) => reason.clone(),
                Ok(_) if all.is_empty() => "the driver shows no GPU to this process".into(),
                Ok(_) => format!("the driver shows {}", all.join(", ")),
            };
            format!("found no GPU {}: {found}", uuid_text(uuid))
        })
    }
}

/// An identifier as NVIDIA's tools print it.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parts = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex);
    format!("GPU-{}", parts.join("-"))
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Device { ordinal, name, pci_address, memory_bytes, compute: (major, minor), .. } = self;
        write!(f, "{ordinal}: {name} ({pci_address}, {} GiB, compute {major}.{minor})", memory_bytes >> 30)
    }
}

impl Device {
    /// The GPUs that CUDA shows to this process, by ordinal. Loads the driver, which takes tens of milliseconds the
    /// first time; takes no device memory.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason why the driver cannot be used.
    ///
    /// ```
    /// match kvhoist::gpu::Device::all() {
    ///     Ok(devices) => devices.iter().for_each(|device| println!("{device}")),
    ///     Err(error) => println!("{error}"),
    /// }
    /// ```
    pub fn all() -> error::Result<Vec<Self>> {
        let Discovery { driver, devices } = discover();
        driver.map(|_| devices).map_err(|reason| Error::unavailable("device", reason))
    }
}

/// Loads the driver and queries its devices. Takes tens of milliseconds the first time, and no device memory.
pub fn discover() -> Discovery {
    let driver = match Driver::get() {
        Ok(driver) => driver,
        Err(reason) => return Discovery { driver: Err(reason), devices: Vec::new() },
    };
    let mut count = 0;
    // SAFETY: the function exists, and writes one integer.
    let counted = check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) });
    let devices = counted.and_then(|()| (0..count).map(describe).collect());
    match devices {
        Ok(devices) => Discovery { driver: Ok(driver.version), devices },
        Err(fault) => Discovery { driver: Err(fault.to_string()), devices: Vec::new() },
    }
}

/// The ordinal of the device that an address of device memory belongs to; `None` for other addresses.
pub fn device_of(address: *const u8) -> Option<u32> {
    Driver::get().ok()?;
    let mut ordinal = 0_i32;
    let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    let found = has("cuPointerGetAttribute").then(|| {
        // SAFETY: the function exists, and writes one integer; the address is looked up and not read.
        unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), which, address.expose_provenance() as u64) }
    })?;
    if found == CUresult::CUDA_SUCCESS { u32::try_from(ordinal).ok() } else { None }
}

/// The driver's handle of a device.
pub(super) fn handle(ordinal: i32) -> Result<CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: the function exists, because an ordinal comes from a loaded driver; it writes one integer.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
    Ok(device)
}

pub(super) fn attribute(device: CUdevice, attribute: CUdevice_attribute) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: the function exists, and writes one integer.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value)
}

fn describe(ordinal: i32) -> Result<Device, CudaError> {
    use CUdevice_attribute as A;

    let device = handle(ordinal)?;
    // An attribute unknown to an older driver counts as absent.
    let flag = |which| attribute(device, which).is_ok_and(|value| value != 0);
    let mut memory_bytes = 0;
    // SAFETY: the function exists, and writes one integer.
    check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
    let mut name = [0_u8; 128];
    // SAFETY: the function exists, and writes a string of 128 bytes at most.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) })?;
    let mut pci = [0_u8; 32];
    // SAFETY: the function exists, and writes a string of 32 bytes at most.
    check("cuDeviceGetPCIBusId", unsafe {
        sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as i32, device)
    })?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    if has("cuDeviceGetUuid_v2") {
        // SAFETY: the function exists, and writes 16 bytes.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) })?;
    }
    Ok(Device {
        ordinal: ordinal as u32,
        name: text(&name),
        pci_address: text(&pci).to_lowercase(),
        uuid: uuid.bytes.map(|byte| byte as u8),
        memory_bytes: memory_bytes as u64,
        compute: (
            attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(device, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        copy_engines: attribute(device, A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
        dma_buf: flag(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        gpu_direct_rdma: flag(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
        host_addresses: flag(A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
    })
}

fn text(bytes: &[u8]) -> String {
    CStr::from_bytes_until_nul(bytes).map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}
