//! Addresses on the command line: the transport, and the host with its port.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The accepted forms of an address, for messages.
pub(crate) const FORMS: &str =
    "tcp://HOST:PORT, rdma://HOST:PORT, unix:PATH or unix:@NAME (IPv6 in brackets: tcp://[::1]:50051)";

/// An address to listen on or to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp(HostPort),
    /// RDMA, negotiated on a TCP port.
    Rdma(HostPort),
    Unix(UnixName),
}

/// A host and a TCP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    /// A name or an address, without the brackets of IPv6.
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// The name of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UnixName {
    Path(PathBuf),
    /// A name in the kernel's abstract namespace, without a file.
    Abstract(String),
}

impl Address {
    /// Returns the scheme.
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            Self::Tcp(_) => "tcp",
            Self::Rdma(_) => "rdma",
            Self::Unix(_) => "unix",
        }
    }

    /// Returns whether clients can connect to this address. Port 0 is only for listening.
    pub(crate) fn can_be_connected_to(&self) -> bool {
        !matches!(self, Self::Tcp(at) | Self::Rdma(at) if at.port == 0)
    }
}

/// The reason why a text is no address, and the accepted forms.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; accepted: {FORMS}")]
pub(crate) struct AddressError(String);

/// Bytes that the kernel's address has for a path or an abstract name. One more byte ends the path or begins
/// the name.
const LONGEST_PATH: usize = 107;

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let parsed = match text.split_once(':') {
            Some(("tcp", rest)) => authority(rest).map(Self::Tcp),
            Some(("rdma", rest)) => authority(rest).map(Self::Rdma),
            Some(("unix", rest)) => unix(rest).map(Self::Unix),
            Some((scheme, rest)) if rest.starts_with("//") => Err(format!("unknown scheme {scheme:?}")),
            _ => Err("a scheme is missing".to_owned()),
        };
        parsed.map_err(AddressError)
    }
}

fn authority(rest: &str) -> Result<HostPort, String> {
    let rest = rest.strip_prefix("//").ok_or("\"//\" is missing after the scheme")?;
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let (host, port) = rest.rsplit_once(':').ok_or("the port is missing")?;
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = match port.parse() {
        Ok(port) if digits => port,
        _ => return Err(format!("bad port {port:?}, which is a number from 0 to 65535")),
    };
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) if inner.split('%').next().is_some_and(|ip| ip.parse::<std::net::Ipv6Addr>().is_ok()) => {
            inner
        }
        Some(inner) => return Err(format!("{inner:?} is no IPv6 address")),
        None => host,
    };
    let plain = |character: char| character.is_alphanumeric() || "-_.:%".contains(character);
    if host.is_empty() {
        return Err("the host is missing".to_owned());
    }
    if host.contains(':') && !rest.starts_with('[') {
        return Err("an IPv6 address needs brackets".to_owned());
    }
    if host.len() > 253 || !host.chars().all(plain) {
        return Err(format!("bad host {host:?}"));
    }
    Ok(HostPort { host: host.to_owned(), port })
}

fn unix(rest: &str) -> Result<UnixName, String> {
    let name = rest.strip_prefix("//").unwrap_or(rest);
    if name.contains('\0') {
        return Err("a path can't contain a zero byte".to_owned());
    }
    let (bare, made): (&str, fn(&str) -> UnixName) = match name.strip_prefix('@') {
        Some(bare) => (bare, |bare| UnixName::Abstract(bare.to_owned())),
        None if rest.starts_with("//") && !name.is_empty() && !name.starts_with('/') => {
            return Err("a path after unix:// is absolute (unix:///PATH)".to_owned());
        }
        None => (name, |bare| UnixName::Path(bare.into())),
    };
    match bare.len() {
        0 => Err("the path is missing".to_owned()),
        1..=LONGEST_PATH => Ok(made(bare)),
        length => Err(format!("the path has {length} bytes, but a socket's path has at most {LONGEST_PATH}")),
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(at) | Self::Rdma(at) => write!(formatter, "{}://{at}", self.scheme()),
            // A parser takes the first two slashes after the scheme off, so a path that begins with two needs
            // two more.
            Self::Unix(UnixName::Path(path)) => {
                let slashes = if path.as_os_str().as_encoded_bytes().starts_with(b"//") { "//" } else { "" };
                write!(formatter, "unix:{slashes}{}", path.display())
            }
            Self::Unix(UnixName::Abstract(name)) => write!(formatter, "unix:@{name}"),
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(formatter, "[{host}]:{port}")
        } else {
            write!(formatter, "{host}:{port}")
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_displayed_address_parses_to_an_equal_address() {
        for (text, shown) in [
            ("tcp://127.0.0.1:50051", "tcp://127.0.0.1:50051"),
            ("tcp://localhost:0/", "tcp://localhost:0"),
            ("rdma://[::1]:50051", "rdma://[::1]:50051"),
            ("rdma://ps0.example:1", "rdma://ps0.example:1"),
            ("unix:/run/a.sock", "unix:/run/a.sock"),
            ("unix:///run/a.sock", "unix:/run/a.sock"),
            ("unix:////run/a.sock", "unix:////run/a.sock"),
            ("unix:relative.sock", "unix:relative.sock"),
            ("unix:@bridge", "unix:@bridge"),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), shown, "{text}");
            assert_eq!(shown.parse(), Ok(address));
        }
    }

    #[test]
    fn a_text_that_is_no_address_is_refused_with_the_accepted_forms() {
        for (text, why) in [
            ("quic://a:1", "unknown scheme \"quic\""),
            ("127.0.0.1:50051", "a scheme is missing"),
            ("", "a scheme is missing"),
            ("tcp:127.0.0.1:1", "\"//\" is missing"),
            ("tcp://127.0.0.1", "the port is missing"),
            ("tcp://127.0.0.1:65536", "bad port \"65536\""),
            ("tcp://127.0.0.1:+1", "bad port \"+1\""),
            ("tcp://:1", "the host is missing"),
            ("tcp://::1:1", "needs brackets"),
            ("tcp://[::g]:1", "\"::g\" is no IPv6 address"),
            ("tcp://a b:1", "bad host"),
            ("unix:", "the path is missing"),
            ("unix:@", "the path is missing"),
            ("unix://relative", "absolute"),
        ] {
            let said = text.parse::<Address>().unwrap_err().to_string();
            assert!(said.contains(why) && said.contains("accepted: tcp://HOST:PORT"), "{text:?}: {said}");
        }
        let long = format!("unix:/{}", "a".repeat(107));
        assert!(long.parse::<Address>().unwrap_err().to_string().contains("108 bytes"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "(tcp|rdma|unix|x)?:?(//)?\\PC{0,40}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }
}
