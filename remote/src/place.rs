//! What a URL names.

use crate::options::{OpenError, Options};

/// Where a store is, and how to speak with it.
#[derive(Debug, PartialEq, Eq)]
pub enum Place {
    S3 { bucket: String, prefix: String },
    Redis(RedisPlace),
}

#[derive(Debug, PartialEq, Eq)]
pub struct RedisPlace {
    pub host: String,
    pub port: u16,
    pub database: i64,
    pub user: Option<String>,
    pub has_tls: bool,
}

const EXPECTED: &str = "s3://BUCKET/PREFIX, redis://HOST:PORT/DATABASE or rediss://HOST:PORT/DATABASE";
const REDIS_PORT: u16 = 6379;

impl Place {
    /// Reads a URL. One with a password or a key is refused, and no part of it is in an error then.
    pub fn parse(url: &str) -> Result<(Self, Options), OpenError> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| refused("no scheme", EXPECTED))?;
        let (user, rest) = match rest.rsplit_once('@') {
            Some((user, rest)) => (Some(user), rest),
            None => (None, rest),
        };
        match (scheme, user) {
            ("s3", Some(_)) => {
                let expected = "keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in ~/.aws/credentials";
                return Err(refused("an `@`, as if it had credentials", expected));
            }
            (_, Some(user)) if user.contains([':', '/', '?']) => {
                let expected =
                    "it in REDISCLI_AUTH or in a file that `password_file` names: URLs are in settings and logs";
                return Err(refused("a password in the URL", expected));
            }
            _ => {}
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let place = match scheme {
            "s3" => Self::s3(host, path)?,
            "redis" | "rediss" => Self::redis(scheme == "rediss", user, host, path)?,
            _ => return Err(refused("another scheme", EXPECTED)),
        };
        Ok((place, Options::parse(scheme, query)?))
    }

    fn s3(bucket: &str, prefix: &str) -> Result<Self, OpenError> {
        let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._".contains(c);
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(is_of_name) {
            let expected = "a bucket's name: 3 to 63 lowercase letters, digits, hyphens, periods and underscores";
            return Err(refused(format!("the bucket {bucket:?}"), expected));
        }
        let prefix = prefix.trim_matches('/');
        if prefix.len() > 512 || prefix.split('/').any(|part| part == "." || part == "..") {
            let expected = "a prefix of at most 512 bytes, without `.` and `..`";
            return Err(refused(format!("a prefix of {} bytes", prefix.len()), expected));
        }
        Ok(Place::S3 { bucket: bucket.into(), prefix: prefix.into() })
    }

    fn redis(has_tls: bool, user: Option<&str>, authority: &str, path: &str) -> Result<Self, OpenError> {
        let (host, port) = match authority.rsplit_once(':') {
            // An IPv6 address without a port ends in a bracket.
            Some((host, port)) if !port.ends_with(']') => {
                // It may be a password: what stands there in a URL without a host.
                (host, port.parse().map_err(|_| refused("a port that is no number up to 65535", EXPECTED))?)
            }
            _ => (authority, REDIS_PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(refused("no host", EXPECTED));
        }
        let database = match path.trim_end_matches('/') {
            "" => 0,
            number => number
                .parse()
                .ok()
                .filter(|database| *database >= 0)
                .ok_or_else(|| refused(format!("the database {number:?}"), "a number, such as 0"))?,
        };
        let user = user.filter(|user| !user.is_empty()).map(Into::into);
        Ok(Place::Redis(RedisPlace { host: host.into(), port, database, user, has_tls }))
    }
}

fn refused(found: impl Into<String>, expected: &str) -> OpenError {
    OpenError::new("the URL of the remote store", found, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_places() {
        let place = |url: &str| Place::parse(url).map(|(place, _)| place);
        let s3 = |bucket: &str, prefix: &str| Place::S3 { bucket: bucket.into(), prefix: prefix.into() };
        assert_eq!(place("s3://cache"), Ok(s3("cache", "")));
        assert_eq!(place("s3://cache/a/b/"), Ok(s3("cache", "a/b")));
        let redis = |host: &str, port, database, user: Option<&str>, has_tls| {
            Place::Redis(RedisPlace { host: host.into(), port, database, user: user.map(Into::into), has_tls })
        };
        assert_eq!(place("redis://h"), Ok(redis("h", 6379, 0, None, false)));
        assert_eq!(place("rediss://u@h:1/2"), Ok(redis("h", 1, 2, Some("u"), true)));
        assert_eq!(place("redis://[::1]:7/"), Ok(redis("::1", 7, 0, None, false)));
        assert_eq!(place("redis://[::1]"), Ok(redis("::1", 6379, 0, None, false)));
        let (place, options) = Place::parse("redis://h:1/2?ttl_s=3").expect("a parameter");
        assert_eq!((place, options.ttl_s), (redis("h", 1, 2, None, false), Some(3)));
    }

    #[test]
    fn other_urls_are_refused_without_their_secrets() {
        for url in [
            "cache",
            "http://cache",
            "s3://",
            "s3://Cache",
            "s3://cache/../other",
            "s3://cache?fast=true",
            "s3://cache?endpoint=http://AKIAEXAMPLE:hunter2@h",
            "redis://",
            "redis://h:x",
            "redis://h/x",
            "redis://h/-1",
            "s3://AKIAEXAMPLE:hunter2@cache",
            "redis://:hunter2@h",
            "redis://:hunter2",
            "redis://user:hunter2/0",
            "redis://:hunter2/x@h",
            "redis://:hunter2?x@h",
            "redis://h/?password=hunter2",
            "rediss://user:hunter2@h:1/0",
        ] {
            let error = Place::parse(url).expect_err(url).to_string();
            assert!(error.contains("expected") && !error.contains("hunter2"), "{url}: {error}");
        }
    }
}
