//! Replies of a service.

use super::{
    hello::{fault_code, fault_of},
    status::{ServiceStatus, SpaceStats},
    wire::{KEYS_MAX, Malformed, Reader, TEXT_BYTES_MAX, Writer, cut, malformed},
};
use crate::{
    block::Tier,
    error::{Error, ServiceFault},
};

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The kind of failure, which decides what the client can do.
    pub fault: ServiceFault,
    /// The value found, the value expected, and the remedy.
    pub text: String,
}

impl Failure {
    /// A failure; a text that is too long for the wire is cut off.
    pub fn new(fault: ServiceFault, text: impl AsRef<str>) -> Self {
        Failure { fault, text: cut(text.as_ref(), TEXT_BYTES_MAX).to_owned() }
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let fault = match error {
            Error::Config { .. } | Error::Argument { .. } => ServiceFault::Argument,
            Error::Busy { .. } => ServiceFault::Busy,
            Error::Timeout { .. } => ServiceFault::Timeout,
            Error::Refused { .. } => ServiceFault::Refused,
            Error::Io { .. } | Error::Copy { .. } => ServiceFault::Io,
            Error::Store { .. } | Error::Unavailable { .. } => ServiceFault::Unavailable,
            Error::Closed => ServiceFault::Draining,
            Error::Service { fault, .. } => *fault,
        };
        Failure::new(fault, error.to_string())
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Error::service(failure.fault, failure.text)
    }
}

/// The result of one block: `true` if it is resident, `false` if it is resident nowhere.
pub type BlockResult = Result<bool, Failure>;

/// A service's reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The request was not done.
    Failed(Failure),
    /// The connection ends. Requests without a reply were not done, or not completely. The hang-up follows when
    /// nothing uses the client's memory any longer.
    Goodbye(Failure),
    /// The space that the connection is attached to now.
    Attached {
        /// Bytes of every block.
        block_bytes: u64,
        /// Disk of the space, bytes.
        capacity_bytes: u64,
        /// Host memory of the space, bytes.
        host_bytes: u64,
    },
    /// A region is registered.
    Registered {
        /// Whether the kernel keeps it pinned.
        pinned: bool,
    },
    /// It is done.
    Done,
    /// A number of blocks.
    Count(u32),
    /// The fastest tier of each leading block.
    Tiers(Vec<Tier>),
    /// One answer a key.
    Flags(Vec<bool>),
    /// One result a block.
    Results(Vec<BlockResult>),
    /// Figures of a space.
    Stats(Box<SpaceStats>),
    /// Figures of the service.
    Status(Box<ServiceStatus>),
}

const FAILED: u16 = 0x100;
const GOODBYE: u16 = 0x101;
const ATTACHED: u16 = 0x102;
const REGISTERED: u16 = 0x103;
const DONE: u16 = 0x104;
const COUNT: u16 = 0x105;
const TIERS: u16 = 0x106;
const FLAGS: u16 = 0x107;
const RESULTS: u16 = 0x108;
const STATS: u16 = 0x109;
const STATUS: u16 = 0x10a;

/// A block's byte in [`Reply::Results`]: 0 and 1 are answers, and from here on each is a failure of the table.
const FIRST_FAILURE: u8 = 2;
/// Failures in the table of a reply; the last one stands for all others.
const FAILURES_MAX: usize = 64;

impl Reply {
    /// The whole frame.
    pub fn encode(&self, id: u64) -> Vec<u8> {
        let kind = match self {
            Reply::Failed(_) => FAILED,
            Reply::Goodbye(_) => GOODBYE,
            Reply::Attached { .. } => ATTACHED,
            Reply::Registered { .. } => REGISTERED,
            Reply::Done => DONE,
            Reply::Count(_) => COUNT,
            Reply::Tiers(_) => TIERS,
            Reply::Flags(_) => FLAGS,
            Reply::Results(_) => RESULTS,
            Reply::Stats(_) => STATS,
            Reply::Status(_) => STATUS,
        };
        let mut writer = Writer::frame(kind, id);
        match self {
            Reply::Failed(failure) | Reply::Goodbye(failure) => encode_failure(&mut writer, failure),
            Reply::Attached { block_bytes, capacity_bytes, host_bytes } => {
                writer.u64(*block_bytes);
                writer.u64(*capacity_bytes);
                writer.u64(*host_bytes);
            }
            Reply::Registered { pinned } => writer.u8(u8::from(*pinned)),
            Reply::Done => {}
            Reply::Count(count) => writer.u32(*count),
            Reply::Tiers(tiers) => encode_bytes(&mut writer, tiers.iter().map(|tier| *tier as u8)),
            Reply::Flags(flags) => encode_bytes(&mut writer, flags.iter().map(|flag| u8::from(*flag))),
            Reply::Results(results) => encode_results(&mut writer, results),
            Reply::Stats(stats) => stats.encode(&mut writer),
            Reply::Status(status) => status.encode(&mut writer),
        }
        writer.finish()
    }

    /// Reads the body of a frame of `kind`.
    ///
    /// # Errors
    /// [`Malformed`] for anything but a reply, and past every limit.
    pub fn decode(kind: u16, body: &[u8]) -> Result<Reply, Malformed> {
        let mut reader = Reader::new(body);
        let reply = match kind {
            FAILED => Reply::Failed(decode_failure(&mut reader)?),
            GOODBYE => Reply::Goodbye(decode_failure(&mut reader)?),
            ATTACHED => Reply::Attached {
                block_bytes: reader.u64("block size")?,
                capacity_bytes: reader.u64("capacity")?,
                host_bytes: reader.u64("host memory")?,
            },
            REGISTERED => Reply::Registered { pinned: reader.flag("pinned")? },
            DONE => Reply::Done,
            COUNT => Reply::Count(reader.u32("count")?),
            TIERS => Reply::Tiers(decode_tiers(&mut reader)?),
            FLAGS => {
                let count = reader.count("number of answers", KEYS_MAX, 1)?;
                Reply::Flags((0..count).map(|_| reader.flag("answer")).collect::<Result<_, _>>()?)
            }
            RESULTS => Reply::Results(decode_results(&mut reader)?),
            STATS => Reply::Stats(Box::new(SpaceStats::decode(&mut reader)?)),
            STATUS => Reply::Status(Box::new(ServiceStatus::decode(&mut reader)?)),
            other => return Err(malformed("kind of reply", other, format!("{FAILED} to {STATUS}"))),
        };
        reader.end()?;
        Ok(reply)
    }
}

fn encode_bytes(writer: &mut Writer, bytes: impl ExactSizeIterator<Item = u8>) {
    writer.reserve(4 + bytes.len());
    writer.count(bytes.len());
    bytes.for_each(|byte| writer.u8(byte));
}

fn decode_tiers(reader: &mut Reader<'_>) -> Result<Vec<Tier>, Malformed> {
    let count = reader.count("number of tiers", KEYS_MAX, 1)?;
    let tier = |byte: &u8| {
        let tier = Tier::ALL.get(usize::from(*byte)).copied();
        tier.ok_or_else(|| malformed("tier", byte, format!("0 to {}", Tier::COUNT - 1)))
    };
    reader.take("tiers", count)?.iter().map(tier).collect()
}

fn encode_failure(writer: &mut Writer, failure: &Failure) {
    writer.u16(fault_code(failure.fault));
    writer.text(&failure.text, TEXT_BYTES_MAX);
}

fn decode_failure(reader: &mut Reader<'_>) -> Result<Failure, Malformed> {
    let fault = fault_of(reader.u16("fault")?);
    Ok(Failure { fault, text: reader.text("text", TEXT_BYTES_MAX)? })
}

fn encode_results(writer: &mut Writer, results: &[BlockResult]) {
    let mut failures: Vec<&Failure> = Vec::new();
    let bytes = results.iter().map(|result| match result {
        Ok(there) => u8::from(*there),
        Err(failure) => {
            let known = failures.iter().position(|known| *known == failure);
            let at = known.unwrap_or_else(|| {
                if failures.len() < FAILURES_MAX {
                    failures.push(failure);
                }
                failures.len() - 1
            });
            FIRST_FAILURE + at as u8
        }
    });
    let bytes: Vec<u8> = bytes.collect();
    encode_bytes(writer, bytes.into_iter());
    writer.count(failures.len());
    for failure in failures {
        encode_failure(writer, failure);
    }
}

fn decode_results(reader: &mut Reader<'_>) -> Result<Vec<BlockResult>, Malformed> {
    let count = reader.count("number of results", KEYS_MAX, 1)?;
    let bytes = reader.take("results", count)?;
    let failures = reader.count("number of failures", FAILURES_MAX, 4)?;
    let failures: Vec<Failure> = (0..failures).map(|_| decode_failure(reader)).collect::<Result<_, _>>()?;
    let result = |byte: &u8| match byte {
        0 => Ok(Ok(false)),
        1 => Ok(Ok(true)),
        other => match failures.get(usize::from(other - FIRST_FAILURE)) {
            Some(failure) => Ok(Err(failure.clone())),
            None => Err(malformed("result", other, format!("0, 1 or one of {} failures", failures.len()))),
        },
    };
    bytes.iter().map(result).collect()
}
