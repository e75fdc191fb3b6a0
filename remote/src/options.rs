//! What a URL says beside where a store is, and why a store was not opened.

use std::{path::PathBuf, str::FromStr, time::Duration};

/// Options of a store: the parameters of its URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// S3: where the service is. None: what the environment says, or AWS itself.
    pub endpoint: Option<String>,
    /// S3: the region of the bucket. None: what the environment says, or `us-east-1`.
    pub region: Option<String>,
    /// S3: the bucket is a part of the host's name, not of the path.
    pub virtual_host: bool,
    /// A file of certificates (PEM) of authorities that are trusted. None: the system's.
    pub ca_file: Option<PathBuf>,
    /// Redis: a file whose first line is the password. None: `REDISCLI_AUTH`.
    pub password_file: Option<PathBuf>,
    /// Redis: seconds after which values are deleted. None: never.
    pub ttl_s: Option<u64>,
    /// How long one request may take. A listing has ten times as long.
    pub timeout: Duration,
    /// How long it may take to connect.
    pub connect_timeout: Duration,
    /// The bytes that an object should have. None: 8 MiB for S3, one block for Redis.
    pub object_bytes: Option<u64>,
    /// Requests in flight at a time.
    pub requests_in_flight: u32,
    /// Threads that speak with the store.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            endpoint: None,
            region: None,
            virtual_host: false,
            ca_file: None,
            password_file: None,
            ttl_s: None,
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(2),
            object_bytes: None,
            requests_in_flight: 16,
            threads: 2,
        }
    }
}

/// Parameters of every URL, and those of one kind of store.
const COMMON: &str = "ca_file, timeout_ms, connect_timeout_ms, object_bytes, requests_in_flight, threads";
const OF_S3: &str = "endpoint, region, virtual_host";
const OF_REDIS: &str = "password_file, ttl_s";

impl Options {
    /// Reads the parameters of a URL: what stands behind its question mark.
    pub fn parse(scheme: &str, query: &str) -> Result<Self, OpenError> {
        let mut options = Options::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_encoding::percent_decode_str(value).decode_utf8();
            let value = value.map_err(|_| OpenError::new(name, "bytes that are no UTF-8", "percent-encoded UTF-8"))?;
            options.set(scheme == "s3", name, &value)?;
        }
        Ok(options)
    }

    fn set(&mut self, is_s3: bool, name: &str, value: &str) -> Result<(), OpenError> {
        let ms = || number(name, value, 1, 86_400_000).map(Duration::from_millis);
        match name {
            "ca_file" => self.ca_file = Some(value.into()),
            "timeout_ms" => self.timeout = ms()?,
            "connect_timeout_ms" => self.connect_timeout = ms()?,
            "object_bytes" => self.object_bytes = Some(number(name, value, 1, 1 << 32)?),
            "requests_in_flight" => self.requests_in_flight = number(name, value, 1, 1024)?,
            "threads" => self.threads = number(name, value, 1, 64)?,
            "endpoint" if is_s3 => self.endpoint = Some(value.into()),
            "region" if is_s3 => self.region = Some(value.into()),
            "virtual_host" if is_s3 => {
                let refused = |_| OpenError::new(name, format!("{value:?}"), "true or false");
                self.virtual_host = value.parse().map_err(refused)?;
            }
            "password_file" if !is_s3 => self.password_file = Some(value.into()),
            "ttl_s" if !is_s3 => self.ttl_s = Some(number(name, value, 1, u64::from(u32::MAX))?),
            // Its value may be a secret.
            _ => {
                let own = if is_s3 { OF_S3 } else { OF_REDIS };
                return Err(OpenError::new("the URL of the remote store", name, format!("one of {own}, {COMMON}")));
            }
        }
        Ok(())
    }
}

fn number<T: FromStr + PartialOrd + std::fmt::Display>(
    name: &str,
    value: &str,
    min: T,
    max: T,
) -> Result<T, OpenError> {
    match value.parse() {
        Ok(number) if number >= min && number <= max => Ok(number),
        _ => Err(OpenError::new(name, format!("{value:?}"), format!("a number from {min} to {max}"))),
    }
}

/// Why a store was not opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: found {found}, expected {expected}")]
pub struct OpenError {
    /// The URL, or the name of one of its parameters.
    pub what: String,
    /// What was found. No credential.
    pub found: String,
    /// What was expected.
    pub expected: String,
    /// Whether it is missing on this machine, which may have it later: a file, or resources. Else the URL is wrong.
    pub may_pass: bool,
}

impl OpenError {
    pub(crate) fn new(what: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        OpenError { what: what.into(), found: found.into(), expected: expected.into(), may_pass: false }
    }

    /// What the machine does not have.
    pub(crate) fn missing(what: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        OpenError { may_pass: true, ..OpenError::new(what, found, expected) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_options() {
        assert_eq!(Options::parse("s3", ""), Ok(Options::default()));
        let query = "endpoint=http://10.0.0.7:9000&region=eu-central-1&virtual_host=true&ca_file=/etc/a%26b.pem\
                     &timeout_ms=1500&connect_timeout_ms=20&object_bytes=1048576&requests_in_flight=64&threads=4";
        let expected = Options {
            endpoint: Some("http://10.0.0.7:9000".into()),
            region: Some("eu-central-1".into()),
            virtual_host: true,
            ca_file: Some("/etc/a&b.pem".into()),
            timeout: Duration::from_millis(1500),
            connect_timeout: Duration::from_millis(20),
            object_bytes: Some(1 << 20),
            requests_in_flight: 64,
            threads: 4,
            ..Options::default()
        };
        assert_eq!(Options::parse("s3", query), Ok(expected));
        let redis = Options { password_file: Some("/run/p".into()), ttl_s: Some(60), ..Options::default() };
        assert_eq!(Options::parse("redis", "password_file=/run/p&ttl_s=60"), Ok(redis));
    }

    #[test]
    fn other_parameters_are_refused_by_name() {
        for (scheme, query, word) in [
            ("s3", "secret_access_key=hunter2", "secret_access_key"),
            ("redis", "password=hunter2", "password"),
            ("redis", "endpoint=x", "endpoint"),
            ("s3", "ttl_s=1", "ttl_s"),
            ("s3", "timeout_ms=0", "timeout_ms"),
            ("s3", "timeout_ms=1s", "timeout_ms"),
            ("s3", "object_bytes=0", "object_bytes"),
            ("s3", "requests_in_flight=1025", "requests_in_flight"),
            ("s3", "threads=65", "threads"),
            ("s3", "virtual_host=yes", "virtual_host"),
            ("s3", "region=%ff", "region"),
            ("redis", "ttl_s=", "ttl_s"),
        ] {
            let error = Options::parse(scheme, query).expect_err(query).to_string();
            assert!(error.contains(word) && error.contains("expected"), "{query}: {error}");
            assert!(!error.contains("hunter2"), "{query}: {error}");
        }
    }
}
