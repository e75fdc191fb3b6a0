//! The GPU: what there is, what its copies give, and what stands between it and a direct path.

use std::sync::Arc;

use kvhoist::internals::{
    device::cuda::{
        copy::{CudaCopy, CudaCopyOptions},
        discover,
    },
    gpu::{Discovery, Gpu},
    memory::Arena,
};

use super::{Finding, Want, system::read};

pub fn findings(ordinal: u32) -> Vec<Finding> {
    let found = discover();
    let mut findings = vec![driver(&found)];
    match found.device(ordinal) {
        Ok(device) => {
            findings.push(Finding::note("device", device.to_string()));
            findings.push(link(&device.pci_address));
            findings.push(copies(ordinal));
        }
        Err(reason) => findings.push(
            Finding::note("device", reason)
                .decides(Want::Cuda, false)
                .fix("none needed without a GPU: host memory plays the device"),
        ),
    }
    findings
}

fn driver(found: &Discovery) -> Finding {
    match &found.driver {
        Ok(version) => {
            let kernel = read("/sys/module/nvidia/version").unwrap_or_else(|| "unknown".into());
            Finding::note("libcuda", format!("CUDA {}.{}, driver {kernel}", version / 1000, version % 1000 / 10))
        }
        Err(reason) => Finding::note("libcuda", reason.clone()),
    }
}

fn link(address: &str) -> Finding {
    let file = |name: &str| read(&format!("/sys/bus/pci/devices/{address}/{name}"));
    let (Some(speed), Some(width)) = (file("current_link_speed"), file("current_link_width")) else {
        return Finding::note("PCIe link", "not shown by this machine");
    };
    let finding = Finding::note("PCIe link", format!("{speed}, x{width}"));
    match (file("max_link_speed"), file("max_link_width")) {
        (Some(most), Some(widest)) if (&most, &widest) != (&speed, &width) => finding.fix(format!(
            "it could be {most}, x{widest}: idle links slow down; look again under load, then at the slot"
        )),
        _ => finding,
    }
}

/// What the copies to and from a device give: opens it as a cache does.
fn copies(ordinal: u32) -> Finding {
    let opened = Gpu::open(ordinal).and_then(|gpu| {
        let arena = Arc::new(Arena::new(16, 1 << 20)?);
        CudaCopy::new(&gpu, &arena, CudaCopyOptions { method: None, blocks_max: 16 })
    });
    let engine = match opened {
        Ok(engine) => engine,
        Err(error) => {
            return Finding::note("copies", error.to_string())
                .decides(Want::Cuda, false)
                .fix("see what the driver says: nvidia-smi, dmesg");
        }
    };
    let calibration = engine.calibration();
    let mut parts = Vec::new();
    for (bytes, count) in [(4 << 10, 4096), (64 << 10, 256), (1 << 20, 16)] {
        let speed = |to_device| {
            let method = calibration.quickest(to_device, bytes, count);
            let seconds = calibration.estimate(to_device, method, bytes, count)?.as_secs_f64();
            Some(format!("{:.0} by {method}", (bytes * count) as f64 / seconds / 1e9))
        };
        let (to, from) = (speed(true).unwrap_or_default(), speed(false).unwrap_or_default());
        parts.push(format!("{} KiB {to} / {from}", bytes >> 10));
    }
    let pinned = if engine.is_pinned() { "" } else { "; host memory cannot be pinned" };
    Finding::note("copies", format!("GB/s to / from: {}{pinned}", parts.join(", "))).decides(Want::Cuda, true)
}
