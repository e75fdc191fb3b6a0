//! Replies of a service.

use kvhoist::{Stats, Tier};

use super::{
    hello::{fault_code, fault_of},
    status::ServiceStatus,
    table::{fields, get, messages, put},
    wire::{Item, KEYS_MAX, Malformed, Reader, TEXT_BYTES_MAX, Wire, Writer, cut, malformed},
};
use crate::error::{Error, ServiceFault};

/// What a client is told of a cache that is closed.
const CACHE_ENDED: &str = "space: found its cache ended by a defect (the log of the service has the panic), expected \
                           one that serves: attach again once all clients of the space have been cut off";

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct Failure {
    /// The kind of failure, which decides what the client can do.
    #[cfg_attr(test, proptest(strategy = "super::tests::fault()"))]
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
        match error {
            // A service closes no cache that has clients.
            Error::Closed => Failure::new(error.fault(), CACHE_ENDED),
            _ => Failure::new(error.fault(), error.to_string()),
        }
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
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
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
    Tiers(#[cfg_attr(test, proptest(strategy = "super::tests::tiers()"))] Vec<Tier>),
    /// One answer a key.
    Flags(Vec<bool>),
    /// One result a block.
    Results(#[cfg_attr(test, proptest(strategy = "super::tests::results()"))] Vec<BlockResult>),
    /// Figures of a space.
    Stats(#[cfg_attr(test, proptest(strategy = "super::tests::boxed_stats()"))] Box<Stats>),
    /// Figures of the service.
    Status(Box<ServiceStatus>),
    /// A file is held: its memory's descriptor comes with the first byte.
    Held,
    /// What a layer of a load came to. The load goes on.
    Layer {
        /// The layer.
        layer: u32,
        /// Leading blocks of the request whose bytes of this layer are in place.
        leading: u32,
        /// Whether the next block failed. False: it is resident nowhere, or there is none.
        failed: bool,
    },
}

messages!(Reply("kind of reply", "256 to 268") {
    0x100 => Failed(failure),
    0x101 => Goodbye(failure),
    0x102 => Attached { block_bytes, capacity_bytes, host_bytes },
    0x103 => Registered { pinned },
    0x104 => Done,
    0x105 => Count(count),
    0x106 => Tiers(tiers),
    0x107 => Flags(flags),
    0x108 => Results(results),
    0x109 => Stats(stats),
    0x10a => Status(status),
    0x10b => Held,
    0x10c => Layer { layer, leading, failed },
});

fields!(Failure { fault, text });

impl Wire for ServiceFault {
    fn put(&self, writer: &mut Writer) {
        fault_code(*self).put(writer);
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        u16::get(reader, what).map(fault_of)
    }
}

impl Item for Failure {
    const NAMES: [&'static str; 2] = ["failure", "number of failures"];
    const BYTES_MIN: usize = 4;
    const COUNT_MAX: usize = FAILURES_MAX;
}

impl Wire for Tier {
    fn put(&self, writer: &mut Writer) {
        (*self as u8).put(writer);
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        let byte = u8::get(reader, what)?;
        let tier = Tier::WITH_REMOTE.get(usize::from(byte)).copied();
        tier.ok_or_else(|| malformed(what, byte, format!("0 to {}", Tier::WITH_REMOTE.len() - 1)))
    }
}

impl Item for Tier {
    const NAMES: [&'static str; 2] = ["tier", "number of tiers"];
    const BYTES_MIN: usize = 1;
    const COUNT_MAX: usize = KEYS_MAX;
}

/// A block's byte in [`Reply::Results`]: 0 and 1 are answers, and from here on each is a failure of the table.
const FIRST_FAILURE: u8 = 2;
/// Failures in the table of a reply; the last one stands for all others.
const FAILURES_MAX: usize = 64;

/// A byte for each result, then the table of failures.
impl Wire for Vec<BlockResult> {
    fn put(&self, writer: &mut Writer) {
        let mut failures: Vec<Failure> = Vec::new();
        writer.count(self.len());
        for result in self {
            match result {
                Ok(there) => there.put(writer),
                Err(failure) => {
                    let known = failures.iter().position(|known| known == failure);
                    let at = known.unwrap_or_else(|| {
                        if failures.len() < FAILURES_MAX {
                            failures.push(failure.clone());
                        }
                        failures.len() - 1
                    });
                    (FIRST_FAILURE + at as u8).put(writer);
                }
            }
        }
        failures.put(writer);
    }

    fn get(reader: &mut Reader<'_>, _: &'static str) -> Result<Self, Malformed> {
        let count = reader.count("number of results", KEYS_MAX, 1)?;
        let bytes = reader.take("results", count)?;
        let failures = Vec::<Failure>::get(reader, "failures")?;
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
}
