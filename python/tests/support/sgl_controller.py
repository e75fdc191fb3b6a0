"""What SGLang's controller is asked for in tests: backups and prefetches, waited for; bytes of device pools."""

from __future__ import annotations

import time

import sgl
import torch
from sgl_pages import raw

PATIENCE_S = 60


def await_(condition, what):
    """Waits for what SGLang's threads do; they tell nobody in 0.5.17."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.002)


def device_buffers(device) -> list:
    return device.k_buffer + device.v_buffer if getattr(device, "k_buffer", None) else device.kv_buffer


def device_noise(device, seed):
    buffers = device_buffers(device)
    generator = torch.Generator(buffers[0].device).manual_seed(seed)
    for buffer in buffers:
        raw(buffer).random_(0, 256, generator=generator)
    return buffers


def rows(buffers, indices):
    return [raw(buffer[indices].contiguous()) for buffer in buffers]


def backup(controller, host_indices, keys):
    controller.write_storage(host_indices, [], keys)
    return controller.ack_backup_queue.get(timeout=PATIENCE_S)


def prefetch(controller, host, tokens):
    """As the radix cache does it: ask, take memory for what was hit, read. Returns the operation when it has ended."""
    controller.prefetch("request", tokens)
    return _read(controller, host, controller.prefetch_hit_queue.get(timeout=PATIENCE_S))


def prefetch_or_miss(controller, host, tokens):
    """As `prefetch`; None where too little was hit for one."""
    controller.prefetch("request", tokens)
    revoked = getattr(controller, "prefetch_revoke_queue", None)  # 0.5.23 has one queue for both.
    await_(lambda: controller.prefetch_hit_queue.qsize() or (revoked and revoked.qsize()), "the answer to a prefetch")
    if revoked and revoked.qsize():
        revoked.get()
        return None
    operation = _read(controller, host, controller.prefetch_hit_queue.get())
    return operation if operation.storage_hit_count else None


def _read(controller, host, operation):
    if operation.storage_hit_count == 0:
        return operation
    operation.host_indices = host.alloc(operation.storage_hit_count)
    ended = []
    transfer = controller._page_transfer
    controller._page_transfer = lambda op: ended.append(transfer(op)) or ended[-1]
    controller.prefetch_buffer.put(operation)
    await_(lambda: ended, "the end of a prefetch")
    controller._page_transfer = transfer
    if sgl.version() >= (0, 5, 23):
        operation.completed_tokens = ended[0] * controller.page_size
    return operation
