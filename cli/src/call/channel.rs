//! Connections to the user's server over each transport, and calls of encoded messages on them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes};
use clap::ValueEnum;
use serde::Serialize;
use tokio_stream::Stream;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::HeaderMap;
use tonic::codegen::http::header::{HeaderName, HeaderValue};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{BinaryMetadataKey, MetadataMap};
use tonic::transport::Endpoint;
use tonic::{Code, Request, Response, Status, Streaming, TimeoutExpired};
use tonic_rdma::{Config, RdmaChannel, RdmaConnectInfo, RdmaConnector, Verdict};
use tonic_rdma_commands::{Context as _, Failure, ValueError, displayed_by_name};

use crate::measure::transport::CallChannel;

/// The longest time of a dial, and of all questions to a server's reflection.
pub(super) const SETUP: Duration = Duration::from_secs(20);

/// A transport of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Transport {
    /// The best that the server has: native calls, HTTP/2 over RDMA, or TCP.
    Auto,
    /// HTTP/2 over TCP, by tonic's own channel.
    Tcp,
    /// HTTP/2 over RDMA, by tonic's channel with an `RdmaConnector`.
    DropIn,
    /// Calls without HTTP/2 over RDMA, by an `RdmaChannel`.
    Native,
}
displayed_by_name!(Transport);

/// The server of the user.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    pub(crate) url: String,
    endpoint: Box<Endpoint>,
}

impl Server {
    /// Parses HOST:PORT or an http URL.
    pub(crate) fn parse(text: &str) -> Result<Self, ValueError> {
        let accepted = || ValueError::unknown("HOST:PORT, or http://HOST:PORT");
        let url = match text.split_once("://") {
            Some(("https", _)) => {
                return Err(ValueError("this command has no certificates for https".into()));
            }
            Some(("http", _)) => text.to_owned(),
            Some(_) => return Err(accepted()),
            None if !text.contains(':') => return Err(accepted()),
            None => format!("http://{text}"),
        };
        let endpoint = Endpoint::from_shared(url.clone()).map_err(|_| accepted())?.connect_timeout(SETUP);
        match endpoint.uri().host() {
            Some(host) if !host.is_empty() => Ok(Self { url, endpoint: endpoint.into() }),
            _ => Err(accepted()),
        }
    }
}

/// What makes the connections of a channel, and so knows the last one.
#[derive(Clone, Debug)]
enum Dialled {
    Tcp,
    DropIn(Arc<RdmaConnector>),
    Native(RdmaChannel),
}

/// A connection to the server. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    client: Grpc<CallChannel>,
    dialled: Dialled,
}

/// The transport that a connection really has, and why.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Path {
    /// `Tcp`, `DropIn` or `Native`.
    pub(crate) transport: Transport,
    pub(crate) device: Option<String>,
    pub(crate) provider: Option<&'static str>,
    pub(crate) reason: String,
}

impl Path {
    fn of(info: Option<RdmaConnectInfo>) -> Self {
        let Some(info) = info else { return Self::tcp("no connection was negotiated") };
        let transport = match (info.verdict(), info.is_native()) {
            (Verdict::Tcp, _) => Transport::Tcp,
            (Verdict::Rdma, false) => Transport::DropIn,
            (Verdict::Rdma, true) => Transport::Native,
        };
        let device = info.device().map(str::to_owned);
        Self { transport, device, provider: info.provider(), reason: info.reason().to_owned() }
    }

    fn tcp(reason: &str) -> Self {
        Self { transport: Transport::Tcp, device: None, provider: None, reason: reason.to_owned() }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.transport, &self.device) {
            (Transport::Native, Some(device)) => write!(formatter, "native calls over RDMA ({device})"),
            (Transport::DropIn, Some(device)) => write!(formatter, "HTTP/2 over RDMA ({device})"),
            _ => formatter.write_str("HTTP/2 over TCP"),
        }
    }
}

impl Connection {
    /// Connects to `server` over `transport`, within 20 s.
    pub(crate) async fn open(
        server: &Server,
        transport: Transport,
        config: &Config,
    ) -> Result<Self, Failure> {
        let (endpoint, config) = (Endpoint::clone(&server.endpoint), config.clone());
        let failed = || format!("{transport}: can't connect to {}", server.url);
        let dial = async {
            Ok::<_, Failure>(match transport {
                Transport::Tcp => (endpoint.connect().await.context(failed())?.into(), Dialled::Tcp),
                Transport::DropIn => {
                    let connector = RdmaConnector::new().config(config);
                    let channel = endpoint.connect_with_connector(connector.clone()).await;
                    (channel.context(failed())?.into(), Dialled::DropIn(connector.into()))
                }
                Transport::Native | Transport::Auto => {
                    let channel = RdmaChannel::builder(endpoint).config(config).connect().await;
                    let channel = channel.context(failed())?;
                    (channel.clone().into(), Dialled::Native(channel))
                }
            })
        };
        let dialled = tokio::time::timeout(SETUP, dial).await;
        let silent = || Failure::run(format!("{}: no answer within {} s", failed(), SETUP.as_secs()));
        let (channel, dialled) = dialled.unwrap_or_else(|_| Err(silent()))?;
        // Limits of messages are for programs that don't trust their server.
        let client = Grpc::<CallChannel>::new(channel);
        let client = client.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX);
        Ok(Self { client, dialled })
    }

    /// Returns the same connection for answers of at most `bytes`.
    pub(crate) fn limited(&self, bytes: usize) -> Self {
        let client = self.client.clone().max_decoding_message_size(bytes);
        Self { client, dialled: self.dialled.clone() }
    }

    /// Returns the transport of the last connection.
    pub(crate) fn path(&self) -> Path {
        match &self.dialled {
            Dialled::Tcp => Path::tcp("tcp was asked for"),
            Dialled::DropIn(connector) => Path::of(connector.last_connection()),
            Dialled::Native(channel) => Path::of(channel.last_connection()),
        }
    }

    /// Sends `messages` to `method`. The answers are encoded messages, too.
    pub(crate) async fn call(
        &mut self,
        method: &PathAndQuery,
        metadata: &MetadataMap,
        messages: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Response<Streaming<Bytes>>, Status> {
        let mut request = Request::new(messages);
        request.metadata_mut().clone_from(metadata);
        let ready = self.client.ready().await;
        ready.map_err(|error| Status::unavailable(format!("the channel is broken: {error}")))?;
        self.client.streaming(request, method.clone(), Encoded).await.map_err(|status| {
            // tonic's channel calls the end of a deadline CANCELLED.
            match status.code() == Code::Cancelled && status.message() == TimeoutExpired(()).to_string() {
                true => Status::deadline_exceeded("no answer within the deadline"),
                false => status,
            }
        })
    }
}

/// Passes messages that are encoded already.
#[derive(Clone, Copy, Debug)]
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.reserve(message.len());
        into.put(message);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// A header of the command line.
#[derive(Clone, Debug)]
pub(crate) struct Header(HeaderName, HeaderValue);

impl Header {
    /// Parses `name: value`. The value of a name that ends in `-bin` is base64.
    pub(crate) fn parse(text: &str) -> Result<Self, ValueError> {
        let accepted = || ValueError::unknown("'name: value', such as 'authorization: Bearer abc'");
        let (name, value) = text.split_once(':').ok_or_else(accepted)?;
        let name = HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| accepted())?;
        let value = HeaderValue::from_str(value.trim()).map_err(|_| accepted())?;
        if name.as_str().starts_with("grpc-") || ["te", "content-type"].contains(&name.as_str()) {
            return Err(ValueError(format!("{name} is gRPC's own; --deadline sets the time of a call")));
        }
        let metadata = MetadataMap::from_headers([(name.clone(), value.clone())].into_iter().collect());
        if let Ok(key) = BinaryMetadataKey::from_bytes(name.as_str().as_bytes())
            && metadata.get_bin(key).is_none_or(|value| value.to_bytes().is_err())
        {
            return Err(ValueError(format!("the value of {name} is not base64")));
        }
        Ok(Self(name, value))
    }
}

/// Returns the metadata of a call: these headers, and the deadline.
pub(crate) fn metadata(headers: &[Header], deadline: Duration) -> MetadataMap {
    let headers: HeaderMap =
        headers.iter().map(|Header(name, value)| (name.clone(), value.clone())).collect();
    let mut request = Request::from_parts(MetadataMap::from_headers(headers), Default::default(), ());
    request.set_timeout(deadline);
    request.into_parts().0
}

/// Returns the name of a status as gRPC writes it: `DEADLINE_EXCEEDED`.
pub(crate) fn code_name(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn servers_have_a_host_and_a_port() {
        for (text, url) in [
            ("localhost:50051", "http://localhost:50051"),
            ("http://[::1]:1", "http://[::1]:1"),
            ("[::1]:1", "http://[::1]:1"),
            ("http://service", "http://service"),
        ] {
            assert_eq!(Server::parse(text).unwrap().url, url);
        }
        for bad in ["", "localhost", "unix:///tmp/x", "not an address:1", "http://", ":50051"] {
            assert!(Server::parse(bad).unwrap_err().to_string().contains("HOST:PORT"), "{bad}");
        }
        assert!(Server::parse("https://a:1").unwrap_err().to_string().contains("certificates"));
    }

    #[test]
    fn headers_are_checked() {
        assert_eq!(Header::parse("X-Id:  a: b ").unwrap().0, "x-id");
        assert_eq!(Header::parse("trace-bin: AAEC").unwrap().1, "AAEC");
        for (bad, said) in [
            ("x-id", "'name: value'"),
            (": x", "'name: value'"),
            ("a b: x", "'name: value'"),
            ("grpc-timeout: 1S", "grpc-timeout is gRPC's own"),
            ("Content-Type: text/html", "content-type is gRPC's own"),
            ("trace-bin: ???", "trace-bin is not base64"),
        ] {
            let error = Header::parse(bad).unwrap_err().to_string();
            assert!(error.contains(said), "{bad}: {error}");
        }
    }

    #[test]
    fn codes_have_the_names_of_grpc() {
        let names = [Code::Ok, Code::DeadlineExceeded, Code::Unavailable].map(code_name);
        assert_eq!(names, ["OK", "DEADLINE_EXCEEDED", "UNAVAILABLE"]);
    }
}
