//! Cuts batches into work requests, and links these to chains.

use super::{CHAIN, Entering, PostedBatch, Queue};
use crate::{
    gdr::regions::{Regions, Side},
    rdma::{SIGNALLED, Sge},
};

/// Every 16th work request is signalled, and the last of each chain.
const SIGNAL_EVERY: u64 = 16;

/// A work request is also signalled after this many unsignalled bytes, so that a slow device can be distinguished from
/// a stuck one.
const SIGNAL_BYTES: usize = 1 << 20;

impl Queue {
    /// Builds a chain from the waiting batches and returns its length.
    pub(super) fn build(&mut self, regions: &Regions) -> usize {
        let in_flight = usize::try_from(self.posted - self.done).unwrap_or(usize::MAX);
        let room = (self.qp.depth() as usize).saturating_sub(in_flight).min(CHAIN);
        let mut count = 0;
        while count < room {
            let next = || self.waiting.pop_front().map(|accepted| Entering { accepted, op: 0, offset: 0 });
            let Some(mut entering) = self.entering.take().or_else(next) else { break };
            let first = count;
            let fault = self.cut(&mut entering, regions, first, &mut count, room).err();
            if fault.is_none() && entering.op < entering.accepted.batch.ops().len() {
                self.entering = Some(entering);
                break;
            }
            let end = self.posted + count as u64;
            self.posted_batches.push_back(PostedBatch { accepted: entering.accepted, end, fault });
        }
        let mut silent_bytes = 0;
        for at in 0..count {
            let id = self.posted + at as u64;
            let (last, sges) = (at + 1 == count, &raw mut self.sges[at * self.sges_max]);
            let next = if last { std::ptr::null_mut() } else { &raw mut self.chain[at + 1] };
            let request = &mut self.chain[at];
            request.id = id;
            request.next = next;
            request.sges = sges;
            let sges = &self.sges[at * self.sges_max..][..request.sge_count as usize];
            silent_bytes += sges.iter().map(|sge| sge.bytes as usize).sum::<usize>();
            let signals = last || (id + 1).is_multiple_of(SIGNAL_EVERY) || silent_bytes >= SIGNAL_BYTES;
            request.flags = if signals { SIGNALLED } else { 0 };
            silent_bytes = if signals { 0 } else { silent_bytes };
        }
        count
    }

    /// Cuts a batch into work requests from index `count` of the chain on, until the batch ends or there is no room.
    /// Requests before index `first` belong to other batches.
    fn cut(
        &mut self,
        entering: &mut Entering,
        regions: &Regions,
        first: usize,
        count: &mut usize,
        room: usize,
    ) -> Result<(), String> {
        // Bytes of the latest request, which may still gather more ranges.
        let mut gathered = 0;
        while let Some(op) = entering.accepted.batch.ops().get(entering.op) {
            if entering.offset == op.len {
                (entering.op, entering.offset) = (entering.op + 1, 0);
                continue;
            }
            let (src, dst) = (op.src.addr() + entering.offset, op.dst.addr() + entering.offset);
            let gone = || "a region was unregistered before the copy in it began".to_owned();
            let (from, to) =
                (regions.find(Side::Source, src).ok_or_else(gone)?, regions.find(Side::Target, dst).ok_or_else(gone)?);
            let left = op.len - entering.offset;
            let len = left.min(from.end - src).min(to.end - dst).min(self.request_bytes_max);
            let sge = Sge { address: src as u64, bytes: len as u32, lkey: from.lkey };
            let joined = *count > first && {
                let request = &mut self.chain[*count - 1];
                let sges = request.sge_count as usize;
                let joins = request.rkey == to.rkey
                    && request.remote_address + gathered as u64 == dst as u64
                    && sges < self.sges_max
                    && gathered + len <= self.request_bytes_max;
                if joins {
                    self.sges[(*count - 1) * self.sges_max + sges] = sge;
                    request.sge_count += 1;
                    gathered += len;
                }
                joins
            };
            if !joined {
                if *count == room {
                    return Ok(());
                }
                let request = &mut self.chain[*count];
                request.sge_count = 1;
                request.remote_address = dst as u64;
                request.rkey = to.rkey;
                self.sges[*count * self.sges_max] = sge;
                gathered = len;
                *count += 1;
            }
            entering.offset += len;
        }
        Ok(())
    }
}
