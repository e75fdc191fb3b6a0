//! S3, and what speaks its protocol, by OpenDAL.

use std::{fmt, time::Duration};

use bytes::Bytes;
use futures_util::StreamExt;
use kvhoist::remote::{Capabilities, Created, Object, Page, ReadBuffer, RemoteFuture, RemoteStore};
use opendal::{
    Buffer, ErrorKind, HttpBody, HttpTransport, HttpTransporter, OperationContext, Operator,
    options::{ListOptions, WriteOptions},
    services,
};
use opendal_http_transport_reqwest::ReqwestTransport;

use crate::{
    failure::of_s3,
    options::{OpenError, Options},
    runtime::Runtime,
    tls,
};

/// The bytes of an object: a request takes 10 to 50 ms to its first byte, as long as some MiB take.
const OBJECT_BYTES: u64 = 8 << 20;
/// Objects of a page: what a request lists.
const PAGE_OBJECTS: usize = 1000;
/// Listings go through pages that may be slow on a large bucket.
const LISTING_TIMEOUTS: u32 = 10;
/// Bytes of an answer that is no range of an object: an error, or a page of a listing, which has less than 2 MiB.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// How long a connection without requests is kept.
const IDLE: Duration = Duration::from_secs(30);

/// A bucket, or a part of one.
pub struct S3 {
    operator: Operator,
    runtime: Runtime,
    capabilities: Capabilities,
    timeout: Duration,
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3").field("bucket", &self.operator.info().name()).finish_non_exhaustive()
    }
}

impl S3 {
    pub fn open(bucket: &str, prefix: &str, options: &Options, runtime: Runtime) -> Result<Self, OpenError> {
        let mut builder = services::S3::default().bucket(bucket).root(&format!("/{prefix}"));
        let endpoint = options.endpoint.clone();
        if let Some(endpoint) = endpoint.or_else(|| variable(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])) {
            builder = builder.endpoint(check_endpoint(&endpoint, bucket, options.virtual_host)?);
        }
        let region = options.region.clone().or_else(|| variable(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
        builder = builder.region(region.as_deref().unwrap_or("us-east-1"));
        if options.virtual_host {
            builder = builder.enable_virtual_host_style();
        }
        let refused = |error: opendal::Error| {
            OpenError::new("the S3 store", format!("{:?}", error.kind()), "a bucket, an endpoint and a region")
        };
        let context = OperationContext::new().with_http_transport(HttpTransporter::new(transport(options)?));
        let operator = Operator::new(builder).map_err(refused)?.with_context(context);
        let capabilities = Capabilities {
            scheme: "s3",
            object_bytes: options.object_bytes.unwrap_or(OBJECT_BYTES),
            requests_in_flight: options.requests_in_flight,
            reads_per_call: 1,
        };
        Ok(S3 { operator, runtime, capabilities, timeout: options.timeout })
    }
}

/// The first of these variables that says something.
fn variable(names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

/// An endpoint that is where it says. OpenDAL cuts the bucket's name off the front of a host: with `virtual_host` it
/// puts the name there again, without it another host would be asked.
fn check_endpoint<'a>(endpoint: &'a str, bucket: &str, virtual_host: bool) -> Result<&'a str, OpenError> {
    let refused = |found: String, expected: &str| Err(OpenError::new("endpoint", found, expected));
    let host = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
    let is_cut = |host: &str| host.strip_prefix(bucket).is_some_and(|rest| rest.starts_with('.'));
    match host {
        _ if endpoint.contains('@') => {
            refused("credentials".into(), "them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        }
        Some(host) if !virtual_host && is_cut(host) => refused(
            format!("the bucket's name at the front of {host:?}"),
            "`virtual_host=true` if the service has a host for each bucket, else another name or the host's address",
        ),
        Some(_) => Ok(endpoint),
        None => refused(format!("{endpoint:?}"), "http://HOST:PORT or https://HOST:PORT"),
    }
}

/// HTTP whose answers have a bounded length: OpenDAL collects all of one that is no object.
struct Bounded(ReqwestTransport);

impl HttpTransport for Bounded {
    async fn fetch(&self, request: http::Request<Buffer>) -> opendal::Result<http::Response<HttpBody>> {
        let is_ranged = request.headers().contains_key(http::header::RANGE);
        let answer = self.0.fetch(request).await?;
        // A read takes no more than it has room for.
        if is_ranged && answer.status().is_success() {
            return Ok(answer);
        }
        let mut left = ANSWER_BYTES_MAX;
        let bounded = move |piece: opendal::Result<Buffer>| {
            let piece = piece?;
            left = left.checked_sub(piece.len()).ok_or_else(|| {
                let found = format!("an answer of more than {ANSWER_BYTES_MAX} bytes");
                opendal::Error::new(ErrorKind::Unexpected, "read an answer").set_source(std::io::Error::other(found))
            })?;
            Ok(piece)
        };
        Ok(answer.map(|body| body.map_inner(|pieces| Box::new(pieces.map(bounded)))))
    }
}

/// HTTP with our limits and our TLS. The time of a call is its caller's to bound: a page of a listing has longer.
fn transport(options: &Options) -> Result<Bounded, OpenError> {
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured(tls::config(options)?)
        .connect_timeout(options.connect_timeout)
        .pool_max_idle_per_host(options.requests_in_flight as usize)
        .pool_idle_timeout(IDLE)
        .redirect(reqwest::redirect::Policy::none())
        .build();
    let refused = |error: reqwest::Error| OpenError::missing("HTTP", error.to_string(), "a client to start");
    Ok(Bounded(ReqwestTransport::new(client.map_err(refused)?)))
}

impl RemoteStore for S3 {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn read_into(&self, object: &str, start: u64, buffer: ReadBuffer) -> RemoteFuture<ReadBuffer> {
        let (operator, object, mut buffer) = (self.operator.clone(), object.to_owned(), buffer);
        self.runtime.call(self.timeout, async move {
            let end = start + buffer.remaining() as u64;
            if start == end {
                return Ok(buffer);
            }
            let reader = operator.reader(&object).await.map_err(|error| of_s3(&error))?;
            // One request, whose bytes are copied while they are in the processor's cache.
            let mut pieces = reader.into_stream(start..end).await.map_err(|error| of_s3(&error))?;
            while let Some(piece) = pieces.next().await {
                let piece = piece.map_err(|error| of_s3(&error))?;
                Iterator::try_for_each(&mut piece.into_iter(), |bytes| buffer.put(&bytes))?;
            }
            Ok(buffer)
        })
    }

    fn create(&self, object: &str, parts: Vec<Bytes>) -> RemoteFuture<Created> {
        let (operator, object) = (self.operator.clone(), object.to_owned());
        self.runtime.call(self.timeout, async move {
            // One request: the service has the whole object, or none of it.
            let options = WriteOptions { if_not_exists: true, ..Default::default() };
            match operator.write_options(&object, Buffer::from(parts), options).await {
                Ok(_) => Ok(Created::Now),
                Err(error) if error.kind() == ErrorKind::ConditionNotMatch => Ok(Created::Already),
                Err(error) => Err(of_s3(&error)),
            }
        })
    }

    fn list(&self, prefix: &str, after: Option<&str>) -> RemoteFuture<Page> {
        let (operator, prefix) = (self.operator.clone(), prefix.to_owned());
        let options = ListOptions {
            limit: Some(PAGE_OBJECTS),
            start_after: after.map(Into::into),
            recursive: true,
            ..Default::default()
        };
        self.runtime.call(self.timeout * LISTING_TIMEOUTS, async move {
            let mut lister = operator.lister_options(&prefix, options).await.map_err(|error| of_s3(&error))?;
            let mut page = Page::default();
            while page.objects.len() < PAGE_OBJECTS {
                let Some(entry) = lister.next().await else { return Ok(page) };
                let entry = entry.map_err(|error| of_s3(&error))?;
                let about = entry.metadata();
                if about.is_file() {
                    let modified = about.last_modified().map(Into::into);
                    page.objects.push(Object { name: entry.path().into(), bytes: about.content_length(), modified });
                }
            }
            page.next = page.objects.last().map(|object| object.name.clone());
            Ok(page)
        })
    }

    fn delete(&self, objects: &[String]) -> RemoteFuture<()> {
        let (operator, objects) = (self.operator.clone(), objects.to_vec());
        self.runtime.call(self.timeout, async move {
            match operator.delete_iter(objects).await {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(of_s3(&error)),
                _ => Ok(()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_where_it_says() {
        let check = |endpoint, virtual_host| check_endpoint(endpoint, "kv", virtual_host);
        for endpoint in
            ["http://10.0.0.7:9000", "https://kvs.example.com", "https://s3.kv.example.com", "http://kv:9000"]
        {
            assert_eq!(check(endpoint, false), Ok(endpoint));
        }
        for endpoint in ["https://kv.s3.eu-central-1.amazonaws.com", "http://kv.internal:9000"] {
            let error = check(endpoint, false).expect_err(endpoint).to_string();
            assert!(error.contains("virtual_host=true"), "{error}");
            assert_eq!(check(endpoint, true), Ok(endpoint));
        }
        for (endpoint, word) in
            [("10.0.0.7:9000", "http://HOST:PORT"), ("http://AKIAEXAMPLE:hunter2@h", "AWS_ACCESS_KEY_ID")]
        {
            let error = check(endpoint, true).expect_err(endpoint).to_string();
            assert!(error.contains(word) && !error.contains("hunter2"), "{error}");
        }
    }
}
