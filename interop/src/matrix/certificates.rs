//! Certificates for tests: an authority's, and of it a server's and a client's. Made anew each time, in a folder that goes
//! with them.

use std::path::PathBuf;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use tempfile::TempDir;

/// What could not be made or written.
type Error = Box<dyn std::error::Error + Send + Sync>;

/// The name in the server's certificate. No machine has it, so that clients have to be told to ask for it.
pub(crate) const SERVER: &str = "server.interop.test";

/// The files, until this is dropped. Nobody but this user may read them.
#[derive(Debug)]
pub(crate) struct Certificates {
    folder: TempDir,
}

impl Certificates {
    pub(crate) fn make() -> Result<Self, Error> {
        let made = Self { folder: tempfile::Builder::new().prefix("interop-").tempdir()? };
        let authority = authority("the authority of this run")?;
        made.write("ca.pem", &authority.pem())?;
        made.write("other-ca.pem", &self::authority("an authority that vouches for nobody")?.pem())?;
        for (file, name) in [("server", SERVER), ("client", "client.interop.test")] {
            let (certificate, key) = issue(&authority, name)?;
            made.write(&format!("{file}.pem"), &certificate)?;
            made.write(&format!("{file}.key"), &key)?;
        }
        Ok(made)
    }

    /// One of `ca.pem`, `other-ca.pem`, `server.pem`, `server.key`, `client.pem`, `client.key`.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.file(name);
        std::fs::write(&path, text).map_err(|error| format!("can't write {}: {error}", path.display()).into())
    }
}

fn authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    let mut params = CertificateParams::new([])?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    CertifiedIssuer::self_signed(params, KeyPair::generate()?)
}

/// A certificate for the name, and its key.
fn issue(
    authority: &CertifiedIssuer<'static, KeyPair>,
    name: &str,
) -> Result<(String, String), rcgen::Error> {
    let mut params = CertificateParams::new([name.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate()?;
    Ok((params.signed_by(&key, authority)?.pem(), key.serialize_pem()))
}
