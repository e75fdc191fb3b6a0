//! TLS: who is trusted.

use std::{path::Path, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::options::{OpenError, Options};

/// The settings of TLS: the authorities of the option's file, or the system's.
pub fn config(options: &Options) -> Result<ClientConfig, OpenError> {
    let mut roots = RootCertStore::empty();
    match &options.ca_file {
        Some(file) => {
            for certificate in certificates(file)? {
                roots.add(certificate).map_err(|error| wrong_file(file, &error.to_string()))?;
            }
        }
        // A machine without certificates is one that uses no TLS, or is told by the first request.
        None => _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs),
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("ring has the versions of rustls");
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, OpenError> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(wrong_file(file, "no certificate")),
        Err(error) => Err(wrong_file(file, &error.to_string())),
    }
}

fn wrong_file(file: &Path, found: &str) -> OpenError {
    OpenError::missing(format!("ca_file {}", file.display()), found, "a readable file of certificates (PEM)")
}
