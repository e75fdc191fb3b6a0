//! Errors of the libraries in our own words.
//!
//! Their texts are not passed on as they are: an S3 service repeats the signed request, with the key's id, in its
//! answer. What is passed on is the code of the service, and what the network or TLS says.

use std::error::Error as _;

use kvhoist::remote::RemoteError;
use opendal::ErrorKind;

use crate::redis::resp::Failure;

/// What an error of OpenDAL means.
pub fn of_s3(error: &opendal::Error) -> RemoteError {
    let text = s3_text(error);
    match error.kind() {
        ErrorKind::NotFound => RemoteError::NotFound,
        ErrorKind::RateLimited => RemoteError::Throttled(text),
        ErrorKind::PermissionDenied => {
            RemoteError::Refused(format!("{text}; check the credentials and their permissions"))
        }
        ErrorKind::ConfigInvalid => RemoteError::Refused(format!("{text}; check the bucket, the region and the keys")),
        _ if error.kind() == ErrorKind::RangeNotSatisfied || has_another_length(error) => RemoteError::Invalid {
            found: "an object or an answer that ends before the range".into(),
            expected: "the length that its table or the listing says".into(),
        },
        _ if text.contains("SlowDown") => RemoteError::Throttled(text),
        _ if is_lasting(&text) => RemoteError::Refused(text),
        _ => RemoteError::Unavailable(text),
    }
}

/// A complete answer has fewer or more bytes than were asked for: OpenDAL has no kind for that.
fn has_another_length(error: &opendal::Error) -> bool {
    error.to_string().contains("reader got too")
}

/// What no repetition mends: no credentials, a wrong certificate, a redirect to another region.
fn is_lasting(text: &str) -> bool {
    ["credential", "certificate", "PermanentRedirect", "AuthorizationHeaderMalformed", "NotImplemented"]
        .iter()
        .any(|word| text.contains(word))
}

/// The service's code where there is one, else what the layers below say.
fn s3_text(error: &opendal::Error) -> String {
    let text = error.to_string();
    if let Some(code) = quoted_after(&text, "code: \"") {
        return format!("the service answers {code}");
    }
    let mut causes = Vec::new();
    let mut cause = error.source();
    while let Some(inner) = cause {
        causes.push(inner.to_string());
        cause = inner.source();
    }
    // The chain repeats itself from the outside in; the innermost says what happened.
    match causes.pop() {
        Some(innermost) if innermost.contains("credential") || innermost.is_empty() => no_credentials(),
        Some(innermost) => without_times(innermost),
        None if text.contains("credential") => no_credentials(),
        None => match status(&text) {
            Some(status) => format!("the service answers status {status}"),
            None => format!("the request failed ({:?})", error.kind()),
        },
    }
}

fn no_credentials() -> String {
    "found no credentials, expected them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in ~/.aws/credentials, or \
     from the machine's role"
        .into()
}

/// The word of letters and digits behind a mark and before a quote.
fn quoted_after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(mark)?;
    let (code, _) = rest.split_once('"')?;
    (!code.is_empty() && code.len() < 64 && code.chars().all(|c| c.is_ascii_alphanumeric())).then_some(code)
}

/// The status of an answer without a body.
fn status(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("status: ")?;
    rest.get(..3).filter(|status| status.bytes().all(|byte| byte.is_ascii_digit()))
}

impl From<Failure> for RemoteError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Answer(line) => of_redis(&line),
            Failure::Other(found) => RemoteError::Unavailable(format!(
                "found {found}, expected a reply of Redis: is it one that listens there?"
            )),
            Failure::Network(error) => of_network(&error),
        }
    }
}

/// What an error means that a Redis answers: a code, and a text that may repeat the command.
fn of_redis(line: &str) -> RemoteError {
    let code = line.split(' ').next().unwrap_or_default();
    let is_code = !code.is_empty() && code.len() < 32 && code.bytes().all(|byte| byte.is_ascii_uppercase());
    let answers = format!("the server answers {}", if is_code { code } else { "an error" });
    match code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" => RemoteError::Refused(format!("{answers}; check {LOGIN}")),
        "OOM" => RemoteError::Refused(format!("{answers}: it is at its maxmemory, and evicts nothing")),
        "BUSY" | "LOADING" | "TRYAGAIN" => RemoteError::Throttled(answers),
        "MOVED" | "READONLY" | "WRONGTYPE" => RemoteError::Refused(answers),
        _ => RemoteError::Unavailable(answers),
    }
}

/// What an error of a connection means.
pub fn of_network(error: &std::io::Error) -> RemoteError {
    let text = without_times(error.to_string());
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => RemoteError::Unavailable("the server has closed the connection".into()),
        _ if is_lasting(&text) => RemoteError::Refused(text),
        _ => RemoteError::Unavailable(text),
    }
}

/// What the network or TLS says. Of a certificate that is not valid now rustls gives the time of the check, which would
/// make another text of each failure.
fn without_times(text: String) -> String {
    match text.split_once(": verification time") {
        Some((why, _)) => format!("{why}; check the server's certificate and this machine's clock"),
        None => text,
    }
}

/// Where a user and a password come from.
pub const LOGIN: &str = "the user, REDISCLI_AUTH or the password's file";

#[cfg(test)]
mod tests {
    use std::{io, time::Duration};

    use rustls::{CertificateError, Error as TlsError, pki_types::UnixTime};

    use super::*;

    #[test]
    fn what_no_repetition_mends_is_refused_and_says_what_does() {
        let of = |line: &str| RemoteError::from(Failure::Answer(line.into()));
        for (line, what) in
            [("NOPERM no permissions to run 'set'", "REDISCLI_AUTH"), ("OOM command not allowed", "maxmemory")]
        {
            let error = of(line);
            assert!(matches!(&error, RemoteError::Refused(text) if text.contains(what)), "{error}");
        }
        assert!(matches!(of("LOADING the dataset"), RemoteError::Throttled(_)));
    }

    #[test]
    fn a_failure_has_the_text_of_the_one_before_it_of_the_same_cause() {
        let at = |time: u64, of: fn(UnixTime, UnixTime) -> CertificateError| {
            let [time, limit] = [time, 1000].map(|s| UnixTime::since_unix_epoch(Duration::from_secs(s)));
            of_network(&io::Error::new(io::ErrorKind::InvalidData, TlsError::from(of(time, limit))))
        };
        let expired = |time| at(time, |time, not_after| CertificateError::ExpiredContext { time, not_after });
        let early = |time| at(time, |time, not_before| CertificateError::NotValidYetContext { time, not_before });
        for (first, second) in [(expired(2000), expired(2060)), (early(100), early(160))] {
            assert_eq!(first, second, "it is the label of a metric");
            let text = first.to_string();
            assert!(matches!(first, RemoteError::Refused(_)) && text.contains("invalid peer certificate"), "{text}");
        }
        assert_ne!(expired(2000), early(100), "the cause is told");
    }
}
