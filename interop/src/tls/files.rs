//! Certificates and keys in PEM files. Errors name the flag and the path.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys, RootCertStore};
use tonic::transport::{Certificate, Identity};

use tonic_rdma_commands::Failure;

/// Size of the largest file that is read, in bytes. All authorities of a system have a quarter of this size.
const LARGEST: u64 = 1 << 20;

/// A file, and the flag that names it.
pub(super) type FlagFile<'a> = (&'static str, &'a Path);

/// Reads certificates of authorities.
pub(super) fn authorities(flag: &'static str, path: &Path) -> Result<Certificate, Failure> {
    let file = (flag, path);
    let text = read(file)?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file, &text)? {
        roots
            .add(certificate)
            .map_err(|error| wrong(file, &format!("no authority's certificate: {error}")))?;
    }
    Ok(Certificate::from_pem(text))
}

/// Reads a certificate, and checks that the key belongs to it.
pub(super) fn identity(certificate: FlagFile<'_>, key: FlagFile<'_>) -> Result<Identity, Failure> {
    let (chain_text, key_text) = (read(certificate)?, read(key)?);
    let chain = certificates(certificate, &chain_text)?;
    for one in &chain {
        ParsedCertificate::try_from(one)
            .map_err(|error| wrong(certificate, &format!("a certificate that can't be used: {error}")))?;
    }
    let provider: CryptoProvider = ring::default_provider();
    let signing = provider
        .key_provider
        .load_private_key(private_key(key, &key_text)?)
        .map_err(|error| wrong(key, &format!("a key that can't be used: {error}")))?;
    match CertifiedKey::new(chain, signing).keys_match() {
        // Unknown: this kind of key can't return its public half. The handshake finds a wrong key.
        Ok(()) | Err(Error::InconsistentKeys(InconsistentKeys::Unknown)) => {}
        Err(_) => {
            let ((_, other), (flag, _)) = (certificate, certificate);
            return Err(wrong(key, &format!("not the key of the certificate in {flag} {}", other.display())));
        }
    }
    Ok(Identity::from_pem(chain_text, key_text))
}

fn wrong((flag, path): FlagFile<'_>, what: &str) -> Failure {
    Failure::run(format!("{flag}: {}: {what}", path.display()))
}

/// Reads a regular file. It refuses pipes, which could block.
fn read(file: FlagFile<'_>) -> Result<Vec<u8>, Failure> {
    let unreadable = |error: std::io::Error| wrong(file, &format!("can't be read: {error}"));
    let metadata = std::fs::metadata(file.1).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(wrong(file, "not a regular file"));
    }
    let mut text = Vec::new();
    let opened = File::open(file.1).map_err(unreadable)?;
    opened.take(LARGEST + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > LARGEST {
        return Err(wrong(file, &format!("larger than {LARGEST} bytes")));
    }
    Ok(text)
}

fn certificates(file: FlagFile<'_>, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let found = found.map_err(|error| wrong(file, &broken(&error)))?;
    if found.is_empty() {
        return Err(wrong(file, &format!("no certificate in it: {}", describe_content(text))));
    }
    Ok(found)
}

fn private_key(file: FlagFile<'_>, text: &[u8]) -> Result<PrivateKeyDer<'static>, Failure> {
    match PrivateKeyDer::from_pem_slice(text) {
        Ok(key) => Ok(key),
        Err(pem::Error::NoItemsFound) => {
            Err(wrong(file, &format!("no private key in it: {}", describe_content(text))))
        }
        Err(error) => Err(wrong(file, &broken(&error))),
    }
}

fn broken(error: &pem::Error) -> String {
    format!("broken PEM: {error}")
}

/// Describes the content of a file without the expected item.
fn describe_content(text: &[u8]) -> &'static str {
    let has = |label: &str| {
        let marker = format!("-----BEGIN {label}-----");
        text.windows(marker.len()).any(|window| window == marker.as_bytes())
    };
    if text.is_empty() {
        "it is empty"
    } else if has("ENCRYPTED PRIVATE KEY") {
        "it has an encrypted key, which has to be decrypted first"
    } else if ["PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY"].into_iter().any(has) {
        "it has a private key"
    } else if has("CERTIFICATE") {
        "it has a certificate"
    } else if text.first() == Some(&0x30) {
        "it looks like DER, and has to be PEM"
    } else {
        "it is not PEM, or has no certificate or key"
    }
}
