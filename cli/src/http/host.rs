//! The names under which `--http` answers.
//!
//! A page of any site can make a browser send requests to this address under the site's own name, by letting that name
//! resolve to it (DNS rebinding), and then read the answers. The name is in the request: only addresses, `localhost`,
//! and the names that the operator gave are answered.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use axum::{
    extract::{Request, State},
    http::{StatusCode, header, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};

/// Refuses requests under other names. One without a name is no browser's.
pub(super) async fn check(State(names): State<Arc<[String]>>, request: Request, next: Next) -> Response {
    let in_headers = request.headers().get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or("?"));
    let mut hosts = in_headers.chain(request.uri().authority().map(Authority::as_str));
    match hosts.find(|host| !is_ours(host, &names)) {
        None => next.run(request).await,
        Some(found) => {
            let text =
                format!("Host: found {found:?}, expected an IP address, localhost, or a name that --http-host gives\n");
            (StatusCode::MISDIRECTED_REQUEST, text).into_response()
        }
    }
}

/// Whether a request for this host, with or without a port, is answered.
fn is_ours(host: &str, names: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let (whole, host) = (authority.as_str(), authority.host());
    let port = whole.strip_prefix(host);
    if !port.is_some_and(|port| port.is_empty() || port.starts_with(':')) {
        return false;
    }
    let is_v6 = |host: &str| host.strip_prefix('[').and_then(|host| host.strip_suffix(']')?.parse::<Ipv6Addr>().ok());
    let is_address = host.parse::<Ipv4Addr>().is_ok() || is_v6(host).is_some();
    let is_named = |name: &str| host.trim_end_matches('.').eq_ignore_ascii_case(name.trim_end_matches('.'));
    is_address || is_named("localhost") || names.iter().any(|name| is_named(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_localhost_and_given_names_are_answered() {
        let names = ["node7.example".to_owned()];
        for host in ["127.0.0.1:9401", "10.1.2.3", "[::1]:9401", "[fe80::1]", "localhost", "LocalHost:80", "localhost."]
        {
            assert!(is_ours(host, &names), "{host}");
        }
        assert!(is_ours("node7.example:9401", &names) && is_ours("NODE7.example.", &names));
        let others = [
            "",
            "?",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "node7.example.evil",
            "1",
            "a@",
            "::1",
            "[::1].evil",
        ];
        for host in others {
            assert!(!is_ours(host, &names), "{host}");
        }
    }
}
