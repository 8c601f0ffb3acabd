//! Certificates for tests: an authority, and certificates that it signs for a server and a client. They are
//! new each time, in a temporary folder.

use std::path::PathBuf;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use tempfile::TempDir;

/// An error of making or writing the files.
type Error = Box<dyn std::error::Error>;

/// The name in the server's certificate. No machine has this name, so clients need a flag with it.
pub(crate) const SERVER: &str = "server.interop.test";

/// The files. Dropping this value deletes them. Only this user may read them.
#[derive(Debug)]
pub(crate) struct Certificates {
    folder: TempDir,
}

impl Certificates {
    pub(crate) fn make() -> Result<Self, Error> {
        let made = Self { folder: tempfile::Builder::new().prefix("interop-").tempdir()? };
        let authority = authority("the authority of this run")?;
        made.write("ca.pem", &authority.pem())?;
        made.write("other-ca.pem", &self::authority("an authority that signs nothing")?.pem())?;
        for (file, name) in [("server", SERVER), ("client", "client.interop.test")] {
            let (certificate, key) = issue(&authority, name)?;
            made.write(&format!("{file}.pem"), &certificate)?;
            made.write(&format!("{file}.key"), &key)?;
        }
        Ok(made)
    }

    /// Returns the path of one of `ca.pem`, `other-ca.pem`, `server.pem`, `server.key`, `client.pem`,
    /// `client.key`.
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

/// Makes a certificate for the name, and returns it with its key.
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
