//! Certificate authorities, and certificates that they sign.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

/// A certificate authority that signs the certificates of servers and clients.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    /// Creates an authority with this common name.
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer }
    }

    /// Returns the authority's own certificate.
    pub fn certificate(&self) -> Certificate {
        Certificate::from_pem(self.issuer.pem())
    }

    /// Issues a certificate with the common name `name`, and with `name`, 127.0.0.1 and a URI as alternative
    /// names.
    pub fn issue(&self, name: &str) -> Identity {
        self.sign(name, |_| {})
    }

    /// Issues a certificate that has expired.
    pub fn issue_expired(&self, name: &str) -> Identity {
        self.sign(name, |params| {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        })
    }

    fn sign(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Identity {
        let mut params = CertificateParams::new([name.to_owned(), "127.0.0.1".to_owned()]).unwrap();
        let uri = format!("spiffe://test/{name}").as_str().try_into().unwrap();
        params.subject_alt_names.push(rcgen::SanType::URI(uri));
        params.distinguished_name.push(DnType::CommonName, name);
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Identity::from_pem(certificate.pem(), key.serialize_pem())
    }

    /// Returns settings of a server that shows a certificate and asks for none.
    pub fn server(&self) -> ServerTlsConfig {
        ServerTlsConfig::new().identity(self.issue("server"))
    }

    /// Returns settings of a server that demands a certificate of this authority.
    pub fn mutual_server(&self) -> ServerTlsConfig {
        self.server().client_ca_root(self.certificate())
    }

    /// Returns settings of a client that trusts this authority, and shows no certificate.
    pub fn client(&self) -> ClientTlsConfig {
        ClientTlsConfig::new().ca_certificate(self.certificate()).domain_name("server")
    }

    /// Returns settings of a client that shows a certificate for `name`.
    pub fn client_named(&self, name: &str) -> ClientTlsConfig {
        self.client().identity(self.issue(name))
    }
}
