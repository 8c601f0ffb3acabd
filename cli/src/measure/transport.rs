//! The connections of `compare` and `parameter-server`. No other file of the two commands connects over RDMA.
//! Also the channel of all gRPC modes, the encoding of messages, and TCP listeners.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::{Context, Poll};
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{Service, StdError};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_rdma::gather::{GatherBoth, GatherRequests};
use tonic_rdma::{
    CallConfig, Config, Policy, Provider, RdmaChannel, RdmaConnectInfo, RdmaConnector, RdmaIncoming,
    RdmaServer,
};
use tonic_rdma_commands::{Context as _, Failure, ValueError};
use tonic_rdma_tensor::buffer::{BufferClient, BufferClientBuilder};
use tonic_rdma_tensor::{DeviceBuilder, RdmaDevice};
use tower::ServiceExt as _;
use tower::util::{Either, MapErr};

use crate::measure::process::pinned;
use crate::measure::settings::Http2;

/// The default of [`CallConfig::connection_limit`].
const CONNECTION_LIMIT: u64 = 256 << 20;

/// The address of processes that only this host reaches.
pub(crate) const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The settings of RDMA connections: the command line has precedence over the `RDMA_*` variables.
#[derive(Clone, Debug)]
pub(crate) struct Rdma {
    config: Config,
    /// The settings of native calls.
    calls: CallConfig,
    /// Their landing budget.
    landing: u64,
}

/// Returns the device of this name, if it can be used.
fn usable(name: &str) -> Result<&str, Failure> {
    let found = tonic_rdma_verbs::devices();
    match found.iter().find(|device| device.name == name).map(|device| &device.state) {
        Some(Ok(_)) => Ok(name),
        Some(Err(reason)) => Err(Failure::usage(format!("--provider: {name} can't be used: {reason}"))),
        None => {
            let names: Vec<&str> = found.iter().map(|device| device.name.as_str()).collect();
            let names = names.join(", ");
            Err(Failure::usage(format!(
                "--provider: no device {name:?}; accepted: auto, soft, ibverbs, {names}"
            )))
        }
    }
}

/// The connection that both sides agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RdmaConnection {
    /// The provider in use, such as `soft`.
    pub(crate) provider: String,
    /// Device and reason, for people.
    pub(crate) reason: String,
}

/// A mode that was idle for longer makes an operation outside the measured time first. After 5 s
/// ([`Config::ping_interval`]) connections free what they keep for long messages, so the next operation would
/// measure page faults.
pub(crate) const RESTED: Duration = Duration::from_secs(4);

impl RdmaConnection {
    fn of(info: &RdmaConnectInfo) -> Self {
        let provider = info.provider().unwrap_or("none").to_owned();
        Self { provider, reason: info.reason().to_owned() }
    }
}

impl Rdma {
    /// Makes the configuration for `provider` (`auto`, `soft`, `ibverbs`, or a device). It fails if a
    /// variable or the provider is bad.
    pub(crate) fn new(provider: &str) -> Result<Self, Failure> {
        let config = Config::from_env()
            .map_err(|error| Failure::usage("an RDMA_* variable is not accepted").because(error))?;
        let config = match provider {
            "auto" => config,
            "soft" => config.provider(Provider::Soft),
            "ibverbs" => config.provider(Provider::Ibverbs),
            name => config.provider(None).device(usable(name)?),
        };
        Ok(Self {
            config: config.policy(Policy::Require),
            calls: CallConfig::default(),
            landing: CONNECTION_LIMIT,
        })
    }

    /// Returns the settings with enough memory for so many connections, each with native calls that carry up
    /// to `longest` bytes. What the user has set, and defaults that are enough, stay as they are.
    pub(crate) fn for_load(self, connections: u32, longest: u64) -> Self {
        /// Bytes of a message beside its payload, at most.
        const BESIDE: u64 = 1 << 20;
        // A receiver may keep a message for a check after the trial, while the next one lands.
        let landing = longest.saturating_add(BESIDE).saturating_mul(2).max(CONNECTION_LIMIT);
        let calls = match landing > CONNECTION_LIMIT {
            true => self.calls.connection_limit(landing),
            false => self.calls,
        };
        let is_usual = connections <= 1 && landing <= CONNECTION_LIMIT;
        let config = match is_usual || std::env::var_os("RDMA_PINNED_LIMIT").is_some() {
            true => self.config,
            false => self.config.pinned_limit(pinned(connections, landing)),
        };
        Self { config, calls, landing }
    }

    /// Returns the builder of a tensor device: one queue pair to its peer.
    pub(crate) fn tensor_device(&self) -> DeviceBuilder {
        RdmaDevice::builder().config(self.config.clone())
    }

    /// Returns the settings with at most `bytes` of registered memory.
    pub(crate) fn at_most(self, bytes: u64) -> Self {
        /// The default of [`Config::pinned_limit`].
        const DEFAULT: u64 = 2 << 30;
        let limit = self.config.get_pinned_limit().unwrap_or(DEFAULT).min(bytes);
        Self { config: self.config.pinned_limit(limit), ..self }
    }

    /// Listens for RDMA peers on a free port of `ip`, and with [`Policy::Prefer`] for stock clients too.
    pub(crate) async fn bind(
        &self,
        ip: IpAddr,
        policy: Policy,
    ) -> Result<(RdmaIncoming, SocketAddr), Failure> {
        let config = self.config.clone().policy(policy);
        let incoming = RdmaIncoming::builder()
            .config(config)
            .bind((ip, 0))
            .await
            .context("can't listen for RDMA peers")?;
        let address = incoming.local_addr();
        Ok((incoming, address))
    }

    /// Connects to `endpoint` over RDMA, without a fallback.
    pub(crate) async fn connect(&self, endpoint: Endpoint) -> Result<(Channel, RdmaConnection), Failure> {
        let connector = RdmaConnector::new().config(self.config.clone());
        let channel =
            endpoint.connect_with_connector(connector.clone()).await.context("can't connect over RDMA")?;
        let info = connector.last_connection().ok_or_else(|| Failure::run("no connection was made"))?;
        Ok((channel, RdmaConnection::of(&info)))
    }

    /// Connects to `endpoint` for native calls. A connection that carries HTTP/2 is an error.
    pub(crate) async fn connect_native(
        &self,
        endpoint: Endpoint,
    ) -> Result<(RdmaChannel, RdmaConnection), Failure> {
        let channel = RdmaChannel::builder(endpoint).config(self.config.clone()).calls(self.calls.clone());
        let channel = channel.connect().await.context("can't connect for native calls")?;
        let verdict = native_connection(&channel)?;
        Ok((channel, verdict))
    }

    /// Returns a server for native calls, HTTP/2 over RDMA, and TCP on one port.
    pub(crate) fn server(&self, http2: Http2) -> RdmaServer {
        let server = RdmaServer::new().config(self.config.clone()).calls(self.calls.clone());
        server.http2(http2.server(Server::builder()))
    }
}

/// Returns the settings of a client that fetches by a device as `rdma` says, or else over TCP.
pub(crate) fn fetching(rdma: Option<&Rdma>) -> Result<BufferClientBuilder, Failure> {
    let builder = BufferClient::builder();
    match rdma {
        Some(Rdma { config, landing, .. }) => Ok(builder.config(config.clone()).landing_budget(*landing)),
        None => {
            let config = Config::from_env()
                .map_err(|error| Failure::usage("an RDMA_* variable is not accepted").because(error))?;
            Ok(builder.config(config.policy(Policy::TcpOnly)))
        }
    }
}

/// Parses a name that can be a device's. The library checks whether the device exists.
pub(crate) fn parse_provider(text: &str) -> Result<String, ValueError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
    if text.is_empty() || text.len() > 64 || !text.bytes().all(plain) {
        let accepted = "auto, soft, ibverbs, or the name of a device as `tonic-rdma devices` shows it";
        return Err(ValueError::unknown(accepted));
    }
    Ok(text.to_owned())
}

/// A channel, whose errors have one type whatever the transport.
type Plain<S> = MapErr<S, fn(<S as Service<Request<Body>>>::Error) -> StdError>;

/// The three kinds of channels.
type AnyChannel = Either<Plain<Channel>, Either<Plain<RdmaChannel>, Plain<GatherBoth<RdmaChannel>>>>;

/// A channel for generated clients. Clones share the connection.
///
/// The choice between the kinds costs a branch. A boxed future would cost an allocation for each call.
#[derive(Clone, Debug)]
pub(crate) struct CallChannel {
    inner: AnyChannel,
    /// The channel once more if it makes native calls, to inspect its connection.
    native: Option<RdmaChannel>,
}

impl From<Channel> for CallChannel {
    fn from(channel: Channel) -> Self {
        let channel: Plain<Channel> = channel.map_err(StdError::from);
        Self { inner: Either::Left(channel), native: None }
    }
}

impl From<RdmaChannel> for CallChannel {
    fn from(channel: RdmaChannel) -> Self {
        let native = Some(channel.clone());
        let channel: Plain<RdmaChannel> = channel.map_err(StdError::from);
        Self { inner: Either::Right(Either::Left(channel)), native }
    }
}

impl CallChannel {
    /// Makes a channel with native calls, which sends payloads by reference and takes them where they land.
    pub(crate) fn gathering(channel: RdmaChannel) -> Self {
        let native = Some(channel.clone());
        let both = GatherBoth::new(channel).max_decoding_message_size(usize::MAX);
        let both: Plain<GatherBoth<RdmaChannel>> = both.map_err(StdError::from);
        Self { inner: Either::Right(Either::Right(both)), native }
    }

    /// Fails if the channel is for native calls and its last connection carries HTTP/2.
    pub(crate) fn check_native(&self) -> Result<(), Failure> {
        match &self.native {
            Some(channel) => native_connection(channel).map(drop),
            None => Ok(()),
        }
    }
}

impl Service<Request<Body>> for CallChannel {
    type Response = Response<Body>;
    type Error = StdError;
    type Future = <AnyChannel as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.inner.call(request)
    }
}

/// Returns the last connection of `channel`, which must make native calls.
fn native_connection(channel: &RdmaChannel) -> Result<RdmaConnection, Failure> {
    match channel.last_connection() {
        Some(info) if info.is_native() => Ok(RdmaConnection::of(&info)),
        info => {
            let reason =
                info.map_or_else(|| "no connection was made".to_owned(), |info| info.reason().to_owned());
            Err(Failure::run(format!("the connection makes no native calls: {reason}")))
        }
    }
}

/// A channel that sends large fields by reference, or as generated code does.
pub(crate) type EncodingChannel = Either<GatherRequests<CallChannel>, CallChannel>;

/// Whether payloads are copied when messages are encoded, in modes without an encoding of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Encode {
    /// Payloads are copied into one buffer, as all generated code does.
    #[default]
    Copy,
    /// Payloads go by reference, with [`GatherRequests`], in all modes.
    Gather,
}

impl Encode {
    /// Wraps `channel` so that its requests are encoded this way.
    pub(crate) fn wrap(self, channel: CallChannel) -> EncodingChannel {
        match self {
            Self::Gather => Either::Left(GatherRequests::new(channel)),
            Self::Copy => Either::Right(channel),
        }
    }
}

impl fmt::Display for Encode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy => "messages are encoded into one buffer, as generated code does",
            Self::Gather => "payloads go by reference (tonic_rdma::gather), in all modes",
        })
    }
}

/// Listens on a free port of `ip`, with nodelay on every connection.
pub(crate) fn tcp_listener(ip: IpAddr) -> Result<TcpIncoming, Failure> {
    let incoming = TcpIncoming::bind((ip, 0).into());
    Ok(incoming.context(format!("can't listen on {ip}"))?.with_nodelay(Some(true)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_a_connection_is_the_library_s_default() {
        assert_eq!(Config::default().connection_limit(CONNECTION_LIMIT), Config::default());
    }

    #[test]
    fn a_device_s_name_has_no_blanks() {
        assert!(parse_provider("a b").is_err() && parse_provider("mlx5_0").is_ok());
    }
}
