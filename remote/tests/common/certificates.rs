//! An authority of the test's own, and a server's certificate by it.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// Files of certificates, for a server on this machine.
pub struct Certificates {
    folder: tempfile::TempDir,
}

impl Certificates {
    /// `None` if openssl is not installed.
    pub fn make() -> Option<Self> {
        Command::new("openssl").arg("version").stdout(Stdio::null()).status().ok()?;
        let made = Certificates { folder: tempfile::tempdir().expect("a folder") };
        std::fs::write(made.path("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost\n").expect("written");
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
        made.openssl(&format!("req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=authority -days 2"));
        made.openssl(&format!("req {key} -keyout key.pem -out request.pem -subj /CN=localhost"));
        made.openssl(
            "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -days 2 -extfile names",
        );
        Some(made)
    }

    fn openssl(&self, arguments: &str) {
        let made = Command::new("openssl").args(arguments.split(' ')).current_dir(self.folder.path()).output();
        let made = made.expect("openssl runs");
        assert!(made.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&made.stderr));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The authority's certificate.
    pub fn authority(&self) -> String {
        self.text("ca.pem")
    }

    /// The server's certificate and its key.
    pub fn server(&self) -> [String; 2] {
        [self.text("cert.pem"), self.text("key.pem")]
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    /// Ends TLS on a port of this machine, and passes what it has to a server on another port; until the runtime ends.
    pub fn before(&self, port: u16, runtime: &tokio::runtime::Runtime) -> u16 {
        let [certificate, key] = self.server();
        let certificates = CertificateDer::pem_file_iter(Path::new(&certificate)).and_then(Iterator::collect);
        let key = PrivateKeyDer::from_pem_file(key).expect("a key");
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring has them")
            .with_no_client_auth()
            .with_single_cert(certificates.expect("certificates"), key)
            .expect("a certificate and its key");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0))).expect("a port");
        let own = listener.local_addr().expect("a port").port();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    // A client that trusts another authority ends the handshake.
                    let Ok(mut client) = acceptor.accept(stream).await else { return };
                    let mut server = TcpStream::connect(("127.0.0.1", port)).await.expect("the server listens");
                    drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
                });
            }
        });
        own
    }
}
