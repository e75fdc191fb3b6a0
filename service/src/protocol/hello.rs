//! The handshake: the only bytes that are the same in every version.

use super::{
    table::{fields, get, put},
    wire::{FRAME_BYTES_MAX, KEYS_MAX, Malformed, PLACES_MAX, Reader, Wire, Writer, malformed},
};
use crate::error::ServiceFault;

/// The first bytes of both ends.
pub const MAGIC: [u8; 8] = *b"kvhoist\n";
/// The oldest version that this build speaks.
pub const VERSION_MIN: u16 = 4;
/// The newest version that this build speaks.
pub const VERSION_MAX: u16 = 4;

/// A client's first bytes: the versions that it speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The oldest one.
    pub version_min: u16,
    /// The newest one.
    pub version_max: u16,
}

impl Hello {
    /// Bytes of a hello.
    pub const BYTES: usize = 16;

    /// The hello of this build.
    pub fn ours() -> Self {
        Hello { version_min: VERSION_MIN, version_max: VERSION_MAX }
    }

    /// The hello as it is sent.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::plain(Self::BYTES);
        writer.bytes(&MAGIC);
        [self.version_min, self.version_max].put(&mut writer);
        0u32.put(&mut writer);
        writer.into_bytes()
    }

    /// Reads a hello. Its last four bytes are for later versions and are ignored.
    ///
    /// # Errors
    /// [`Malformed`] for other bytes than a client's.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        check_magic(&mut reader)?;
        let [version_min, version_max] = Wire::get(&mut reader, "version")?;
        Ok(Hello { version_min, version_max })
    }

    /// The newest version that this build and the client both speak.
    pub fn common_version(&self) -> Option<u16> {
        let version = self.version_max.min(VERSION_MAX);
        (version >= self.version_min.max(VERSION_MIN)).then_some(version)
    }
}

/// The limits of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a frame after its header.
    pub frame_bytes: u32,
    /// Keys in one request.
    pub keys: u32,
    /// Places in one request.
    pub places: u32,
    /// Requests that may be in flight.
    pub requests: u32,
    /// Regions that may be registered.
    pub regions: u32,
    /// Bytes of the frames of requests in flight, after their headers.
    pub request_bytes: u32,
    /// Bytes of all registered regions.
    pub region_bytes: u64,
}

/// Bytes of requests that one connection may have in flight.
const REQUEST_BYTES_MAX: u32 = 8 << 20;

impl Limits {
    /// The limits of this build's frames, with a service's own.
    pub fn new(requests: u32, regions: u32, region_bytes: u64) -> Self {
        Limits {
            frame_bytes: FRAME_BYTES_MAX as u32,
            keys: KEYS_MAX as u32,
            places: PLACES_MAX as u32,
            requests,
            regions,
            request_bytes: REQUEST_BYTES_MAX,
            region_bytes,
        }
    }
}

/// A service's first bytes: the version that is spoken from now on, or why the connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// The oldest version that the service speaks.
    pub version_min: u16,
    /// The newest one.
    pub version_max: u16,
    /// The version that is spoken, or why there is none.
    pub answer: Result<u16, ServiceFault>,
    /// The limits of the connection.
    pub limits: Limits,
}

impl Welcome {
    /// Bytes of a welcome.
    pub const BYTES: usize = 48;

    /// The answer of this build.
    pub fn new(answer: Result<u16, ServiceFault>, limits: Limits) -> Self {
        Welcome { version_min: VERSION_MIN, version_max: VERSION_MAX, answer, limits }
    }

    /// The welcome as it is sent.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::plain(Self::BYTES);
        writer.bytes(&MAGIC);
        let codes = [self.answer.unwrap_or(0), self.answer.err().map_or(0, fault_code)];
        [self.version_min, self.version_max].put(&mut writer);
        codes.put(&mut writer);
        self.limits.put(&mut writer);
        writer.into_bytes()
    }

    /// Reads a welcome.
    ///
    /// # Errors
    /// [`Malformed`] for other bytes than a service's.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        check_magic(&mut reader)?;
        let [version_min, version_max] = Wire::get(&mut reader, "version")?;
        let [version, code] = Wire::get(&mut reader, "version or fault")?;
        let answer = match (version, code) {
            (0, code) => Err(fault_of(code)),
            (version, 0) => Ok(version),
            (version, code) => {
                return Err(malformed("answer", format!("version {version} and fault {code}"), "one of the two"));
            }
        };
        let limits = Wire::get(&mut reader, "limits")?;
        Ok(Welcome { version_min, version_max, answer, limits })
    }
}

fields!(Limits { frame_bytes, keys, places, requests, regions, request_bytes, region_bytes });

fn check_magic(reader: &mut Reader<'_>) -> Result<(), Malformed> {
    let found = reader.take("first bytes", MAGIC.len())?;
    if found == MAGIC {
        return Ok(());
    }
    Err(malformed("first bytes", format!("{found:02x?}"), format!("{MAGIC:02x?} (kvhoist and a line feed)")))
}

/// The number of a fault on the wire, from 1.
pub(super) fn fault_code(fault: ServiceFault) -> u16 {
    ServiceFault::ALL.iter().position(|known| *known == fault).map_or(0, |at| at as u16 + 1)
}

/// The fault of a number. Numbers of later versions become [`ServiceFault::Unavailable`].
pub(super) fn fault_of(code: u16) -> ServiceFault {
    usize::from(code)
        .checked_sub(1)
        .and_then(|at| ServiceFault::ALL.get(at))
        .copied()
        .unwrap_or(ServiceFault::Unavailable)
}
