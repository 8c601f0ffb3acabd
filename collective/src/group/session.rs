//! The session: what all generations of a group have in common, and its settings. Ranks have the numbers of
//! the bootstrap here.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tonic::Code;

use crate::error::{CollectiveError, setting, setup};
use crate::group::calls::{MAX_REQUEST, Peer, Service};
use crate::group::launch::Launch;
use crate::group::proto::group_server::GroupServer;
use crate::group::proto::{Member, Reports};
use crate::group::state::{Epoch, GroupId, SessionState};
use tonic_rdma::unstable::chain;
use tonic_rdma::{Config, Policy, RdmaIncoming};
use tonic_rdma_tensor::unstable::admit_only_ranks;
use tonic_rdma_tensor::unstable::bootstrap::{
    self, Bootstrap, JoinError, MemberInfo, OwnRuntime, VERSION, fresh_key,
};
use tonic_rdma_tensor::{Channel, DeviceBuilder, RdmaDevice, TensorError, TensorErrorKind};

#[cfg(feature = "_tls-any")]
use tonic::transport::{ClientTlsConfig, ServerTlsConfig};

/// The number of channels that are opened at once.
const OPENING: usize = 16;

/// The number of links that a device accepts at least. A large group needs one for each rank.
const MAX_LINKS: usize = 1024;

/// How long a rank that lives may take to let another one watch it, and the pause before it is asked again.
const WATCH: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// What can be done about ranks that have no common RDMA device.
const NO_RDMA: &str = concat!(
    "; ranks move elements by RDMA alone, and `tonic-rdma devices` lists the devices of each host. Between hosts each ",
    "needs a network device (RDMA_DEVICE names it) and the feature ibverbs; without a card, Soft-RoCE is one: ",
    "rdma link add rxe0 type rxe netdev INTERFACE. Within a host the software device needs RDMA_POLICY other than ",
    "tcp-only"
);

/// The session of one rank.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) state: Arc<SessionState>,
    pub(crate) bootstrap: Arc<Bootstrap<Reports>>,
    pub(crate) group: GroupId,
    pub(crate) device: RdmaDevice,
    /// One for each rank, with `None` for this one.
    pub(crate) peers: Vec<Option<RemoteRank>>,
    pub(crate) members: Vec<Member>,
    pub(crate) settings: Settings,
    /// Dropped last.
    pub(crate) runtime: Arc<OwnRuntime>,
}

/// Another rank, as this one reaches it.
#[derive(Clone, Debug)]
pub(crate) struct RemoteRank {
    pub(crate) channel: Channel,
    pub(crate) peer: Peer,
}

/// Meets the other ranks, and opens channels to all of them. To be carried out on `runtime`.
pub(super) async fn connect(
    launch: Launch,
    settings: Settings,
    runtime: Arc<OwnRuntime>,
) -> Result<(Arc<Session>, Arc<Epoch>), CollectiveError> {
    let until = Instant::now() + settings.bootstrap_timeout;
    let state = Arc::new(SessionState::new(launch.rank(), launch.size()));
    // Each other rank opens a link.
    let device = settings.device().max_links(MAX_LINKS.max(2 * launch.size())).build()?;
    admit_only_ranks(&device, None);
    let local = listen(&launch, &settings, &device, &state, until).await?;
    let (bootstrap, group, members) = meet(&launch, &settings, &state, local, until).await?;
    admit_only_ranks(&device, Some(group));
    let epoch = state.begin();
    let peers = mesh(&settings, &state, &device, &members, until).await?;
    for (rank, other) in peers.iter().enumerate() {
        if let Some(other) = other {
            tokio::spawn(watch(Arc::clone(&state), Arc::clone(&bootstrap), rank, other.clone(), group));
        }
    }
    bootstrap.standing.send_modify(|standing| standing.ready = true);
    // Otherwise a program that ends early would end while another rank still opens its channel. A rank that
    // is lost, or is not ready in time, fails the first operation.
    _ = bootstrap.all_ready(until).await;
    let members = members.into_iter().enumerate().map(|(rank, member)| {
        let bad = |error| setup(format!("rank {rank} describes itself by what can't be read: {error}"));
        Member::decode(member.about).map_err(bad)
    });
    let members = members.collect::<Result<_, _>>()?;
    Ok((Arc::new(Session { state, bootstrap, group, device, peers, members, settings, runtime }), epoch))
}

/// Starts this rank's server, and returns its address.
async fn listen(
    launch: &Launch,
    settings: &Settings,
    device: &RdmaDevice,
    state: &Arc<SessionState>,
    until: Instant,
) -> Result<SocketAddr, CollectiveError> {
    let address = launch.address();
    let resolved = resolve(address, until).await?;
    let (rank, size) = (launch.rank(), launch.size());
    let wanted = if rank == 0 {
        of_rank_0(address, &resolved)
    } else {
        let own = of_other_rank(address, &resolved);
        vec![own.map_err(|error| setup(format!("rank {rank} has no way to rank 0 at {address}: {error}")))?]
    };
    // The calls of the group need no RDMA. The channels refuse to be without.
    let config = settings.config()?.policy(Policy::Prefer);
    let incoming = RdmaIncoming::builder().config(config).bind(&wanted[..]).await.map_err(|error| {
        let hint = if rank == 0 {
            "; rank 0 has to run on the host of that address, and no other program may use the port. \
             RDMA_COLLECTIVE_ADDRESS sets another one on all ranks"
        } else {
            ""
        };
        setup(format!("rank {rank} of {size} can't listen on {address}: {error}{hint}"))
    })?;
    let local = incoming.local_addr();
    let server = bootstrap::server();
    #[cfg(feature = "_tls-any")]
    let server = match &settings.server_tls {
        Some(tls) => server.tls_config(tls.clone()).map_err(|error| {
            setting(format!("the TLS settings of the rank's server can't be used: {}", chain(&error)))
        })?,
        None => server,
    };
    let service = GroupServer::new(Service(Arc::clone(state))).max_decoding_message_size(MAX_REQUEST);
    let connections = incoming.filter_map(Result::ok).map(Ok::<_, std::io::Error>);
    let mut server = server;
    let server =
        server.add_service(device.service()).add_service(bootstrap::service(Arc::clone(&state.cell)));
    let server = server.add_service(service).serve_with_incoming(connections);
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(error = chain(&error), "the server of a rank has ended");
        }
    });
    Ok(local)
}

/// Returns the addresses that a name means. A name may be unknown for a while, so this asks again until the
/// time is over.
async fn resolve(address: &str, until: Instant) -> Result<Vec<SocketAddr>, CollectiveError> {
    loop {
        let reason = match tokio::net::lookup_host(address).await {
            Ok(found) => {
                let found: Vec<SocketAddr> = found.collect();
                if !found.is_empty() {
                    return Ok(found);
                }
                "it has no address".to_owned()
            }
            // It is not a name, so another attempt would fail too.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
                return Err(setting(format!("rank 0's address {address:?} is no host:port: {error}")));
            }
            Err(error) => error.to_string(),
        };
        if Instant::now() >= until {
            return Err(setup(format!("rank 0's address {address:?} can't be resolved: {reason}")));
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// Meets the other ranks. Returns the bootstrap, the name of the group, and its members.
async fn meet(
    launch: &Launch,
    settings: &Settings,
    state: &SessionState,
    local: SocketAddr,
    until: Instant,
) -> Result<(Arc<Bootstrap<Reports>>, GroupId, Vec<bootstrap::proto::Member>), CollectiveError> {
    let (rank, size, rank_0) = (launch.rank(), launch.size(), launch.address());
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let named_host = launch.host_name().unwrap_or_default().to_owned();
    let about = Member { host: host(), cores, named_host }.encode_to_vec().into();
    let common = HashMap::from([("the job".to_owned(), launch.job_name().to_owned())]);
    let info = MemberInfo { noun: "rank", number: rank, size, common, address: local.to_string(), about };
    let no_random = |error| setup(format!("the system gives no random numbers: {error}"));
    let fresh = fresh_key().map_err(no_random)?;
    let bootstrap = Bootstrap::new(info, (rank == 0).then(|| vec![fresh; size])).map_err(no_random)?;
    let bootstrap = Arc::new(bootstrap);
    // A rank meets once.
    _ = state.cell.set(Arc::clone(&bootstrap));
    let limit = settings.bootstrap_timeout;
    let late = |missing| setup(format!("the ranks did not meet at {rank_0} within {limit:?}: {missing}"));
    if rank == 0 {
        let members = bootstrap.all_joined(until).await.map_err(late)?;
        return Ok((bootstrap, fresh, members));
    }
    let joined = bootstrap.join(Peer::new(settings, rank_0)?.connection, 0, true, until).await;
    let mut joined = joined.map_err(|reason| match reason {
        JoinError::Late { missing: Some(missing), .. } => late(missing),
        JoinError::Late { trouble, .. } => {
            late(format!("rank 0 has not come, or can't be reached: {trouble}"))
        }
        JoinError::Version(theirs) => setup(format!(
            "rank 0 at {rank_0} speaks version {theirs} of the calls between ranks, and rank {rank} version {VERSION}"
        )),
        JoinError::Other(other) => setup(format!("rank {other} answers at {rank_0}, the address of rank 0")),
        JoinError::Failed(reason) => setup(format!("rank 0 at {rank_0} has failed: {reason}")),
        JoinError::Differs(reason) | JoinError::Refused(reason) => {
            setup(format!("rank 0 at {rank_0} refused rank {rank}: {reason}"))
        }
    })?;
    if joined.members.len() != size {
        let found = joined.members.len();
        return Err(setup(format!("rank 0 at {rank_0} named {found} ranks, not {size}")));
    }
    // Rank 0 is reached under the address that was used just now, whatever its own host calls it.
    if let Some(first) = joined.members.first_mut() {
        first.address = rank_0.to_owned();
    }
    bootstrap.set_keys(vec![joined.key; size]);
    Ok((bootstrap, joined.key, joined.members))
}

/// Opens channels to all other ranks.
async fn mesh(
    settings: &Settings,
    state: &SessionState,
    device: &RdmaDevice,
    members: &[bootstrap::proto::Member],
    until: Instant,
) -> Result<Vec<Option<RemoteRank>>, CollectiveError> {
    let permits = Arc::new(Semaphore::new(OPENING));
    let mut opening = JoinSet::new();
    // Each rank begins with the next one, so that the ranks do not all ask the same one at a time.
    let (before, after) = members.split_at(state.me.min(members.len()));
    let in_turn = (state.me..).zip(after).skip(1).chain((0..).zip(before));
    for (rank, member) in in_turn {
        let peer = Peer::new(settings, &member.address)?;
        let (device, permits, address) = (device.clone(), Arc::clone(&permits), member.address.clone());
        opening.spawn(async move {
            let _permit = permits.acquire_owned().await;
            let channel = open(&device, &address, until).await;
            let channel = channel.map_err(|error| {
                let hint = if error.kind() == TensorErrorKind::NoRdma { NO_RDMA } else { "" };
                setup(format!("no channel to rank {rank} at {address}: {error}{hint}"))
            })?;
            Ok::<_, CollectiveError>((rank, RemoteRank { channel, peer }))
        });
    }
    let mut peers: Vec<Option<RemoteRank>> = members.iter().map(|_| None).collect();
    while let Some(opened) = opening.join_next().await {
        let (rank, other) =
            opened.map_err(|error| setup(format!("a task of the group ended: {error}")))??;
        if let Some(entry) = peers.get_mut(rank) {
            *entry = Some(other);
        }
    }
    Ok(peers)
}

/// Opens a channel. A rank that is asked by many others at once says that it is busy, and a rank that has no
/// answer of rank 0 yet says that the ranks have not met. Such a rank is asked again.
async fn open(device: &RdmaDevice, address: &str, until: Instant) -> Result<Channel, TensorError> {
    loop {
        match device.channel(address, 0).await {
            Err(error)
                if matches!(error.code(), Some(Code::ResourceExhausted | Code::Aborted))
                    && Instant::now() < until =>
            {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50))).await;
            }
            result => return result,
        }
    }
}

/// Receives what a rank reports, until the channel to it closes. A host that vanishes closes it too, because
/// both ends of the channel's connection ping one another.
async fn watch(
    state: Arc<SessionState>,
    bootstrap: Arc<Bootstrap<Reports>>,
    rank: usize,
    other: RemoteRank,
    group: GroupId,
) {
    let hearing = async {
        // The end of this call says nothing, because the channel decides whether the rank is lost.
        while other.channel.is_open() {
            let until = Instant::now() + WATCH;
            if let Ok(stream) = bootstrap.watch(other.peer.connection.clone(), &group, until).await {
                bootstrap.follow(rank, stream, || state.receive_report(rank)).await;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    let reason = tokio::select! {
        reason = other.channel.closed() => reason,
        () = hearing => other.channel.closed().await,
    };
    state.lose(rank, reason.to_string().into());
    bootstrap.note(rank, |other| other.lost = true);
}

/// Returns a text that is equal for processes of one running system.
fn host() -> String {
    let read = |path| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
    read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| format!("unknown {:016x}", fastrand::u64(..)))
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// How connections are made, and which RDMA device they use. Without it, the environment says so.
    pub(crate) config: Option<Config>,
    /// How long the ranks wait for one another at the start.
    pub(crate) bootstrap_timeout: Duration,
    /// How long the survivors of a failure wait for a rank that lives and does not take part in the
    /// agreement.
    pub(crate) agreement_timeout: Duration,
    /// How long a rank may take to answer a question.
    pub(crate) answer_timeout: Duration,
    /// TLS of calls to other ranks.
    #[cfg(feature = "_tls-any")]
    pub(crate) client_tls: Option<ClientTlsConfig>,
    /// TLS of this rank's server.
    #[cfg(feature = "_tls-any")]
    pub(crate) server_tls: Option<ServerTlsConfig>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            config: None,
            bootstrap_timeout: Duration::from_secs(60),
            agreement_timeout: Duration::from_secs(30),
            answer_timeout: Duration::from_millis(100),
            #[cfg(feature = "_tls-any")]
            client_tls: None,
            #[cfg(feature = "_tls-any")]
            server_tls: None,
        }
    }
}

impl Settings {
    /// Returns how connections are made.
    ///
    /// # Errors
    /// A variable of the environment has a bad value. The message names it.
    pub(crate) fn config(&self) -> Result<Config, CollectiveError> {
        match &self.config {
            Some(config) => Ok(config.clone()),
            None => Config::from_env().map_err(|error| setting(error.to_string())),
        }
    }

    /// Returns the builder of the tensor device with these settings.
    pub(crate) fn device(&self) -> DeviceBuilder {
        // The names of regions contain secrets, so that only ranks of the group can attach them.
        // With many ranks for each core a link takes long, so only the time of the bootstrap limits it.
        let builder = DeviceBuilder::default().listed(false).answer_timeout(self.bootstrap_timeout);
        let builder = match &self.config {
            Some(config) => builder.config(config.clone()),
            None => builder,
        };
        #[cfg(feature = "_tls-any")]
        if let Some(tls) = &self.client_tls {
            return builder.client_tls(tls.clone());
        }
        builder
    }

    /// Returns the scheme of calls to other ranks.
    pub(crate) fn scheme(&self) -> &'static str {
        #[cfg(feature = "_tls-any")]
        if self.client_tls.is_some() {
            return "https";
        }
        "http"
    }
}

/// An address of documentation (RFC 5737). A socket that is connected to it has the address of this host's
/// default route. Nothing is sent.
const OUTSIDE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

/// Returns the addresses on which rank 0 listens. `address` is what the other ranks call, and `resolved` is
/// what it means here.
///
/// Many hosts resolve their own name to a loopback address. Other hosts could not reach a server there, so
/// the server listens on all addresses.
pub(super) fn of_rank_0(address: &str, resolved: &[SocketAddr]) -> Vec<SocketAddr> {
    let Some(first) = resolved.first() else { return Vec::new() };
    if resolved.iter().all(|address| address.ip().is_loopback()) && !is_loopback(address) {
        return vec![SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), first.port())];
    }
    resolved.to_vec()
}

/// Returns the address on which another rank listens, with port 0: that of this host on the way to rank 0.
pub(super) fn of_other_rank(address: &str, resolved: &[SocketAddr]) -> io::Result<SocketAddr> {
    let mut local = Err(io::Error::other("the name has no address"));
    for remote in resolved {
        local = local_towards(*remote);
        if local.is_ok() {
            break;
        }
    }
    let local = local?;
    let ip = if local.is_loopback() && !is_loopback(address) {
        local_towards(OUTSIDE).unwrap_or(local)
    } else {
        local
    };
    Ok(SocketAddr::new(ip, 0))
}

/// Returns this host's address on the way to `remote`.
fn local_towards(remote: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = if remote.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0_u16; 8], 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(remote)?;
    Ok(socket.local_addr()?.ip())
}

/// Returns whether `host:port` says in words that it is for this host only.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::{of_other_rank, of_rank_0};
    use std::net::SocketAddr;

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn loopback_stays_loopback_if_it_was_asked_for() {
        for address in ["127.0.0.1:29000", "localhost:29000"] {
            let resolved = [at("127.0.0.1:29000")];
            assert_eq!(of_rank_0(address, &resolved), resolved);
            assert_eq!(of_other_rank(address, &resolved).unwrap(), at("127.0.0.1:0"));
        }
    }

    #[test]
    fn a_host_that_resolves_its_own_name_to_loopback_listens_on_all_addresses() {
        let resolved = [at("127.0.1.1:29000")];
        assert_eq!(of_rank_0("node1:29000", &resolved), [at("0.0.0.0:29000")]);
    }

    #[test]
    fn another_address_is_taken_as_it_is() {
        let resolved = [at("10.0.0.1:29000")];
        assert_eq!(of_rank_0("node1:29000", &resolved), resolved);
    }

    #[test]
    fn a_name_without_an_address_is_an_error() {
        assert!(of_other_rank("node1:29000", &[]).is_err());
    }
}
