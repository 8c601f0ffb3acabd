//! TLS: the official programs' flags, and tonic's configuration from them. Keys and certificates are read and
//! checked first, so that an error names a flag and a file, in place of a failed handshake.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgAction, Args};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};
use tonic_rdma_commands::Failure;

/// Time limit of a handshake. tonic's server has no limit by default.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// TLS at the client.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ClientTlsOptions {
    /// Use TLS; an authority that this system trusts has to have signed the server's certificate
    #[arg(long = "use_tls", value_name = "BOOLEAN", action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true")]
    pub(crate) use_tls: bool,
    /// With TLS: trust the test's authority, --ca_file, and no other
    #[arg(long = "use_test_ca", value_name = "BOOLEAN", action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true")]
    pub(crate) use_test_ca: bool,
    /// Certificate of the test's authority, or several; PEM
    #[arg(long = "ca_file", value_name = "FILE")]
    pub(crate) ca_file: Option<PathBuf>,
    /// Certificate for a server that asks for one, followed by the certificates up to the authority; PEM
    #[arg(long = "client_cert_file", value_name = "FILE", requires = "client_key_file")]
    pub(crate) client_cert_file: Option<PathBuf>,
    /// Private key of the certificate; PEM
    #[arg(long = "client_key_file", value_name = "FILE", requires = "client_cert_file")]
    pub(crate) client_key_file: Option<PathBuf>,
}

/// TLS at the server.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ServerTlsOptions {
    /// Use TLS on all connections
    #[arg(long = "use_tls", value_name = "BOOLEAN", action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true")]
    pub(crate) use_tls: bool,
    /// Certificate of the server, followed by the certificates up to the authority; PEM
    #[arg(long = "cert_file", value_name = "FILE")]
    pub(crate) cert_file: Option<PathBuf>,
    /// Private key of the certificate; PEM
    #[arg(long = "key_file", value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// Require a certificate of this authority from each client (mutual TLS); PEM
    #[arg(long = "client_ca_file", value_name = "FILE")]
    pub(crate) client_ca_file: Option<PathBuf>,
}

/// Configuration of a client, whose files are valid.
#[derive(Clone)]
pub(crate) struct ClientTls(pub(crate) ClientTlsConfig);

impl ClientTlsOptions {
    /// Reads the files, and returns the configuration, or `None` without TLS.
    ///
    /// # Errors
    /// Flags contradict each other, or a file is invalid. The error names the flag and the file.
    pub(crate) fn load(&self) -> Result<Option<ClientTls>, Failure> {
        let files = [
            ("--ca_file", &self.ca_file),
            ("--client_cert_file", &self.client_cert_file),
            ("--client_key_file", &self.client_key_file),
        ];
        if !self.use_tls {
            return refuse_files(&files).map(|()| None);
        }
        let mut config = ClientTlsConfig::new().timeout(HANDSHAKE);
        config = match (self.use_test_ca, &self.ca_file) {
            (true, Some(path)) => config.ca_certificate(authorities("--ca_file", path)?),
            (false, None) => config.with_native_roots(),
            (true, None) => {
                return Err(Failure::run(
                    "--use_test_ca needs --ca_file: certificates for tests are made anew",
                ));
            }
            (false, Some(_)) => {
                return Err(Failure::run("--ca_file is of no use without --use_test_ca"));
            }
        };
        if let (Some(certificate), Some(key)) = (&self.client_cert_file, &self.client_key_file) {
            config =
                config.identity(identity(("--client_cert_file", certificate), ("--client_key_file", key))?);
        }
        Ok(Some(ClientTls(config)))
    }
}

impl ServerTlsOptions {
    /// Reads the files, and returns the configuration, or `None` without TLS.
    ///
    /// # Errors
    /// The errors of [`ClientTlsOptions::load`].
    pub(crate) fn load(&self) -> Result<Option<ServerTlsConfig>, Failure> {
        let files = [
            ("--cert_file", &self.cert_file),
            ("--key_file", &self.key_file),
            ("--client_ca_file", &self.client_ca_file),
        ];
        if !self.use_tls {
            return refuse_files(&files).map(|()| None);
        }
        let (Some(certificate), Some(key)) = (&self.cert_file, &self.key_file) else {
            return Err(Failure::run("--use_tls needs --cert_file and --key_file"));
        };
        let identity = identity(("--cert_file", certificate), ("--key_file", key))?;
        let mut config = ServerTlsConfig::new().timeout(HANDSHAKE).identity(identity);
        if let Some(path) = &self.client_ca_file {
            config = config.client_ca_root(authorities("--client_ca_file", path)?);
        }
        Ok(Some(config))
    }
}

/// Refuses flags with files if TLS is off, because a user who names certificates must not get plaintext.
fn refuse_files(files: &[(&str, &Option<PathBuf>)]) -> Result<(), Failure> {
    match files.iter().find(|(_, path)| path.is_some()) {
        Some((flag, _)) => Err(Failure::run(format!("{flag} is of no use without --use_tls"))),
        None => Ok(()),
    }
}

/// Hides the configuration, because tonic's `Debug` shows the private key.
impl fmt::Debug for ClientTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ClientTls").finish_non_exhaustive()
    }
}

/// Size of the largest file that is read, in bytes. All authorities of a system have a quarter of this size.
const LARGEST: u64 = 1 << 20;

/// A file, and the flag that names it.
type FlagFile<'a> = (&'static str, &'a Path);

/// Reads certificates of authorities.
fn authorities(flag: &'static str, path: &Path) -> Result<Certificate, Failure> {
    let file = (flag, path);
    let text = read(file)?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file, &text)? {
        roots.add(certificate).map_err(|error| wrong(file, "no authority's certificate", &error))?;
    }
    Ok(Certificate::from_pem(text))
}

/// Reads a certificate, and checks that the key belongs to it.
fn identity(certificate: FlagFile<'_>, key: FlagFile<'_>) -> Result<Identity, Failure> {
    let (chain_text, key_text) = (read(certificate)?, read(key)?);
    let chain = certificates(certificate, &chain_text)?;
    for one in &chain {
        ParsedCertificate::try_from(one).map_err(|error| wrong(certificate, "broken certificate", &error))?;
    }
    let private = PrivateKeyDer::from_pem_slice(&key_text);
    let private = private.map_err(|error| wrong(key, "no private key in PEM", &error))?;
    let what = format!("not the key of the certificate in {} {}", certificate.0, certificate.1.display());
    CertifiedKey::from_der(chain, private, &ring::default_provider())
        .map_err(|error| wrong(key, &what, &error))?;
    Ok(Identity::from_pem(chain_text, key_text))
}

fn certificates(file: FlagFile<'_>, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let found = CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
    let found =
        found.and_then(|found| if found.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(found) });
    found.map_err(|error| wrong(file, "no certificate in PEM", &error))
}

fn wrong((flag, path): FlagFile<'_>, what: &str, error: &dyn fmt::Display) -> Failure {
    Failure::run(format!("{flag}: {}: {what}: {error}", path.display()))
}

/// Reads a regular file. It refuses pipes, which could block, and files that are too large.
fn read(file: FlagFile<'_>) -> Result<Vec<u8>, Failure> {
    let mut text = Vec::new();
    let read = std::fs::metadata(file.1).and_then(|metadata| {
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        File::open(file.1)?.take(LARGEST + 1).read_to_end(&mut text)
    });
    read.map_err(|error| wrong(file, "can't be read", &error))?;
    if text.len() as u64 > LARGEST {
        return Err(wrong(file, "can't be read", &format!("larger than {LARGEST} bytes")));
    }
    Ok(text)
}
