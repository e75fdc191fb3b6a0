//! RDMA devices: what there is, how far from the GPU, and whether copies between host and device go through one.

use std::sync::Arc;

use kvhoist::{
    Cache, Config, DeviceKind, EngineMode, block_on,
    internals::{
        device::rdma::discover,
        gpu::{DeviceBuffer, Gpu, WriteFlush},
        memory::DeviceMemory,
        rdma::{Device, Port},
    },
};

use super::{Finding, Want, system::has_module};

/// Bytes that are exported to see whether the driver does.
const EXPORTED_BYTES: usize = 2 << 20;

/// Names of a port that are shown; some have hundreds.
const GIDS_SHOWN: usize = 6;

pub fn findings(ordinal: u32, has_device: bool) -> Vec<Finding> {
    let found = discover();
    let gpu = if has_device { Gpu::open(ordinal).ok() } else { None };
    let mut findings = vec![match &found.library {
        Err(reason) => Finding::note("libibverbs", reason.clone()),
        Ok(dma_buf) => Finding::note("libibverbs", format!("found; registers dma-bufs: {}", yes(*dma_buf))),
    }];
    for device in &found.devices {
        findings.push(of_device(device, gpu.as_deref()));
        findings.extend(device.ports.iter().map(of_port));
    }
    if found.library.is_ok() && found.devices.is_empty() {
        findings.push(Finding::note("RDMA device", "none"));
    }
    if let Some(gpu) = &gpu {
        findings.push(peer_access(gpu));
    }
    let usable = found.devices.iter().any(|device| device.obstacle().is_none());
    findings.push(self_test(ordinal, gpu.is_some(), usable));
    findings
}

fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

fn of_device(device: &Device, gpu: Option<&Gpu>) -> Finding {
    let mut text = device.to_string();
    if let Some(node) = device.numa_node {
        text.push_str(&format!(", NUMA node {node}"));
    }
    if let Some(gpu) = gpu {
        text.push_str(&format!(", distance to the GPU: {}", device.distance_to(&gpu.device().pci_address)));
    }
    text.push_str(&format!(", {} work requests", device.work_requests_max));
    let finding = Finding::note("RDMA device", text);
    match device.obstacle() {
        None => finding,
        Some(obstacle) => finding.fix(obstacle),
    }
}

fn of_port(port: &Port) -> Finding {
    let state = if port.active { "active".to_owned() } else { format!("state {} (4 is active)", port.state) };
    let mut text = format!("{}: {state}, {}, MTU {}", port.number, port.link_layer, port.mtu_bytes);
    if port.lid != 0 {
        text.push_str(&format!(", LID {}", port.lid));
    }
    let shown: Vec<String> = port.gids.iter().take(GIDS_SHOWN).map(ToString::to_string).collect();
    let more = port.gids.len().saturating_sub(GIDS_SHOWN);
    text.push_str(&match (shown.len(), more) {
        (0, _) => ", no GIDs".to_owned(),
        (_, 0) => format!(", GIDs {}", shown.join("; ")),
        _ => format!(", GIDs {}; {more} more", shown.join("; ")),
    });
    Finding::note("port", text)
}

/// How the memory of a GPU can be made known to a NIC: by exporting some.
fn peer_access(gpu: &Arc<Gpu>) -> Finding {
    let exported = DeviceBuffer::new(Arc::clone(gpu), EXPORTED_BYTES).map_err(|error| error.to_string());
    let exported = exported
        .and_then(|buffer| gpu.export_dma_buf(buffer.base().as_ptr().expose_provenance(), EXPORTED_BYTES).map(drop));
    let dma_buf = exported.as_ref().map_or_else(|reason| format!("no ({reason})"), |()| "exported".to_owned());
    let peermem = has_module("nvidia_peermem");
    let flush = match gpu.write_flush() {
        WriteFlush::NotNeeded => "ordered by the GPU",
        WriteFlush::ByDriver => "flushed by the driver",
        WriteFlush::Unavailable => "the GPU does not order them, and the driver cannot flush them",
    };
    let finding = Finding::note(
        "GPUDirect RDMA",
        format!(
            "device: {}, dma-buf: {dma_buf}, nvidia-peermem: {}, writes of a NIC: {flush}",
            yes(gpu.device().gpu_direct_rdma),
            if peermem { "loaded" } else { "not loaded" },
        ),
    );
    if exported.is_err() && !peermem {
        return finding.fix("the open kernel modules of the driver (dma-buf), or modprobe nvidia-peermem");
    }
    finding
}

/// What the engine itself makes of it: a small cache whose copies are to go through the NIC.
fn self_test(ordinal: u32, has_device: bool, has_nic: bool) -> Finding {
    let config = Config::default()
        .block_bytes(64 << 10)
        .host_blocks(4)
        .device_blocks(4)
        .device(if has_device { DeviceKind::Cuda } else { DeviceKind::Simulated })
        .device_ordinal(ordinal)
        .gdr(EngineMode::On);
    let opened = block_on(Cache::open(config)).and_then(|cache| {
        let stats = cache.stats();
        block_on(cache.close())?;
        Ok(stats)
    });
    let result = match &opened {
        // KVHOIST_GDR goes before what is asked for here.
        Ok(stats) if !stats.gdr => return Finding::note("GDR", stats.gdr_reason.clone()).decides(Want::Gdr, false),
        Ok(stats) => stats.gdr_reason.clone(),
        Err(error) => error.to_string(),
    };
    match (opened.is_ok(), has_device) {
        (true, true) => Finding::note("GDR", result).decides(Want::Gdr, true),
        (true, false) => {
            Finding::note("GDR", format!("{result} (between ranges of host memory: there is no CUDA device)"))
                .decides(Want::Gdr, false)
        }
        (false, _) => {
            let finding = Finding::note("GDR", format!("not used: {result}")).decides(Want::Gdr, false);
            let fix = if has_nic { "what the reason names" } else { "none needed: other engines make the copies" };
            finding.fix(fix)
        }
    }
}
