//! The session: what all generations of a group have in common. The ranks here are those of the meeting.

use std::io::Read as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic::transport::Server;
use tonic_rdma::internal::chain;
use tonic_rdma::{Policy, RdmaIncoming};
use tonic_rdma_tensor::internal::admit_only_ranks;
use tonic_rdma_tensor::{Channel, ChannelError, RdmaDevice};

use crate::error::CollectiveError;
use crate::group::client::{Peer, describe};
use crate::group::launch::{Launch, setup};
use crate::group::meeting::{Meeting, VERSION, describe_missing};
use crate::group::place;
use crate::group::proto::group_server::GroupServer;
use crate::group::proto::{JoinReply, JoinRequest, Member};
use crate::group::runtime::OwnRuntime;
use crate::group::service::{MAX_REQUEST, Service};
use crate::group::settings::Settings;
use crate::group::state::{Epoch, GroupId, State};

/// The number of channels that are opened at once.
const OPENING: usize = 16;

/// The number of links that a device accepts at least. A large group needs one for each rank.
const MAX_LINKS: usize = 1024;

/// The session of one rank.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) state: Arc<State>,
    pub(crate) group: GroupId,
    pub(crate) device: RdmaDevice,
    /// One for each rank, with `None` for this one.
    pub(crate) peers: Vec<Option<Other>>,
    pub(crate) members: Vec<Member>,
    pub(crate) answer: Duration,
    pub(crate) patience: Duration,
    /// Dropped last.
    pub(crate) runtime: OwnRuntime,
}

/// Another rank, as this one reaches it.
#[derive(Clone, Debug)]
pub(crate) struct Other {
    pub(crate) channel: Channel,
    pub(crate) peer: Peer,
}

/// What [`connect`] makes on the session's runtime.
struct Connected {
    state: Arc<State>,
    group: GroupId,
    device: RdmaDevice,
    peers: Vec<Option<Other>>,
    members: Vec<Member>,
    epoch: Arc<Epoch>,
}

impl Session {
    /// Meets the other ranks, and opens channels to all of them.
    pub(crate) async fn begin(
        launch: Launch,
        settings: Settings,
    ) -> Result<(Self, Arc<Epoch>), CollectiveError> {
        launch.check()?;
        let runtime = OwnRuntime::new()?;
        let (answer, patience) = (settings.answer, settings.patience);
        let connected = runtime.run(connect(launch, settings)).await?;
        let Connected { state, group, device, peers, members, epoch } = connected;
        Ok((Self { state, group, device, peers, members, answer, patience, runtime }, epoch))
    }
}

async fn connect(launch: Launch, settings: Settings) -> Result<Connected, CollectiveError> {
    let until = Instant::now() + settings.meeting;
    let state = Arc::new(State::new(launch.rank(), launch.size()));
    // Each other rank opens a link.
    let device = settings.device().max_links(MAX_LINKS.max(2 * launch.size())).without_listener()?;
    admit_only_ranks(&device, None);
    let local = listen(&launch, &settings, &device, &state, until).await?;
    let (group, members) = meet(&launch, &settings, &state, local, until).await?;
    admit_only_ranks(&device, Some(group));
    let epoch = state.begin(group);
    let peers = mesh(&settings, &state, &device, &members, until).await?;
    for (rank, other) in peers.iter().enumerate() {
        if let Some(other) = other {
            tokio::spawn(watch(Arc::clone(&state), rank, other.clone(), group, settings.answer));
        }
    }
    state.set_ready();
    all_ready(&peers, group, settings.answer, until).await;
    Ok(Connected { state, group, device, peers, members, epoch })
}

/// Starts this rank's server, and returns its address.
async fn listen(
    launch: &Launch,
    settings: &Settings,
    device: &RdmaDevice,
    state: &Arc<State>,
    until: Instant,
) -> Result<SocketAddr, CollectiveError> {
    let address = launch.address();
    let resolved = resolve(address, until).await?;
    let (rank, size) = (launch.rank(), launch.size());
    let wanted = if rank == 0 {
        place::of_rank_0(address, &resolved)
    } else {
        let own = place::of_other_rank(address, &resolved);
        vec![own.map_err(|error| setup(format!("rank {rank} has no way to rank 0 at {address}: {error}")))?]
    };
    // The calls of the group need no RDMA. The channels refuse to be without.
    let config = settings.config()?.policy(Policy::Prefer);
    let incoming = RdmaIncoming::bind_with(&wanted[..], config).await.map_err(|error| {
        let hint = if rank == 0 {
            "; rank 0 has to run on the host of that address, and no other program may use the port. \
             RDMA_COLLECTIVE_ADDRESS sets another one on all ranks"
        } else {
            ""
        };
        setup(format!("rank {rank} of {size} can't listen on {address}: {error}{hint}"))
    })?;
    let local = incoming.local_addr();
    let server = Server::builder();
    #[cfg(feature = "_tls-any")]
    let server = match &settings.server_tls {
        Some(tls) => server.tls_config(tls.clone()).map_err(|error| {
            setup(format!("the TLS settings of the rank's server can't be used: {}", chain(&error)))
        })?,
        None => server,
    };
    let service = GroupServer::new(Service::new(Arc::clone(state))).max_decoding_message_size(MAX_REQUEST);
    let connections = incoming.filter_map(Result::ok).map(Ok::<_, std::io::Error>);
    let mut server = server
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)));
    let server = server.add_service(device.service()).add_service(service).serve_with_incoming(connections);
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(error = chain(&error), "the server of a rank has ended");
        }
    });
    Ok(local)
}

/// Returns the addresses that a name means. A name may be unknown for a while, so this asks again until the time is over.
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
            // Not a name, so waiting is in vain.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
                return Err(setup(format!("rank 0's address {address:?} is no host:port: {error}")));
            }
            Err(error) => error.to_string(),
        };
        if Instant::now() >= until {
            return Err(setup(format!("rank 0's address {address:?} can't be resolved: {reason}")));
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// Meets the other ranks. Returns the name of the group and its members.
async fn meet(
    launch: &Launch,
    settings: &Settings,
    state: &Arc<State>,
    local: SocketAddr,
    until: Instant,
) -> Result<(GroupId, Vec<Member>), CollectiveError> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let member = Member { address: local.to_string(), host: host(), cores };
    if launch.rank() == 0 {
        let meeting = Meeting::new(launch.job(), launch.size(), member);
        let group = fresh_id()?;
        state.open_meeting(meeting, group);
        let members = wait_for_all(launch, settings, state, until).await?;
        return Ok((group, members));
    }
    let request = JoinRequest {
        version: VERSION,
        job: launch.job().to_owned(),
        rank: launch.rank() as u32,
        size: launch.size() as u32,
        process: fresh_id()?.to_vec().into(),
        member: Some(member),
    };
    let mut reply = join(launch, settings, request, until).await?;
    let group = GroupId::try_from(&reply.group[..]);
    let group = group.map_err(|_| setup(format!("rank 0 at {} named no group", launch.address())))?;
    if reply.members.len() != launch.size() {
        let (found, size) = (reply.members.len(), launch.size());
        return Err(setup(format!("rank 0 at {} named {found} ranks, not {size}", launch.address())));
    }
    // Rank 0 is reached as it was reached now, whatever its own host calls it.
    if let Some(rank_0) = reply.members.first_mut() {
        rank_0.address = launch.address().to_owned();
    }
    Ok((group, reply.members))
}

/// Waits, at rank 0, until all ranks have come.
async fn wait_for_all(
    launch: &Launch,
    settings: &Settings,
    state: &State,
    until: Instant,
) -> Result<Vec<Member>, CollectiveError> {
    loop {
        let mut changed = Box::pin(state.changed.notified());
        changed.as_mut().enable();
        if let Some(members) = state.look_at_meeting(Meeting::members).flatten() {
            return Ok(members);
        }
        if tokio::time::timeout_at(until, changed).await.is_err() {
            let missing = state.look_at_meeting(Meeting::describe).unwrap_or_default();
            let (address, limit) = (launch.address(), settings.meeting);
            return Err(setup(format!("the ranks did not meet at {address} within {limit:?}: {missing}")));
        }
    }
}

/// Joins the meeting at rank 0, again and again until all ranks have come.
async fn join(
    launch: &Launch,
    settings: &Settings,
    request: JoinRequest,
    until: Instant,
) -> Result<JoinReply, CollectiveError> {
    let address = launch.address();
    let rank_0 = Peer::new(settings, address).map_err(setup)?;
    let mut pause = Duration::from_millis(10);
    let (mut missing, mut trouble) = (None, None);
    while Instant::now() < until {
        let left = until.saturating_duration_since(Instant::now());
        match rank_0.join(request.clone(), left.min(Duration::from_secs(10))).await {
            Ok(reply) if reply.missing.is_empty() => return Ok(reply),
            Ok(reply) => {
                missing = Some(describe_missing(&reply.missing, launch.size()));
                continue;
            }
            Err(status) => {
                let fatal = [Code::FailedPrecondition, Code::AlreadyExists, Code::InvalidArgument];
                if fatal.contains(&status.code()) {
                    let (rank, reason) = (launch.rank(), status.message());
                    return Err(setup(format!("rank 0 at {address} refused rank {rank}: {reason}")));
                }
                // A call that had no time left says less than an earlier one.
                if trouble.is_none() || status.code() != Code::DeadlineExceeded {
                    trouble = Some(describe(&status));
                }
            }
        }
        tokio::time::sleep(pause.min(until.saturating_duration_since(Instant::now()))).await;
        pause = (pause * 2).min(Duration::from_millis(250));
    }
    // What rank 0 said once says more than the reason why the last call did not end in time.
    let reason = missing.unwrap_or_else(|| {
        format!("rank 0 has not come, or can't be reached: {}", trouble.as_deref().unwrap_or("no answer"))
    });
    let limit = settings.meeting;
    Err(setup(format!("the ranks did not meet at {address} within {limit:?}: {reason}")))
}

/// Opens channels to all other ranks.
async fn mesh(
    settings: &Settings,
    state: &State,
    device: &RdmaDevice,
    members: &[Member],
    until: Instant,
) -> Result<Vec<Option<Other>>, CollectiveError> {
    let places = Arc::new(Semaphore::new(OPENING));
    let mut opening = JoinSet::new();
    for (rank, member) in members.iter().enumerate().filter(|(rank, _)| *rank != state.me) {
        let peer = Peer::new(settings, &member.address).map_err(setup)?;
        let (device, places, address) = (device.clone(), Arc::clone(&places), member.address.clone());
        opening.spawn(async move {
            let _place = places.acquire_owned().await;
            let channel = open(&device, &address, until).await;
            let channel =
                channel.map_err(|error| setup(format!("no channel to rank {rank} at {address}: {error}")))?;
            Ok::<_, CollectiveError>((rank, Other { channel, peer }))
        });
    }
    let mut peers: Vec<Option<Other>> = members.iter().map(|_| None).collect();
    while let Some(opened) = opening.join_next().await {
        let (rank, other) =
            opened.map_err(|error| setup(format!("a task of the group ended: {error}")))??;
        if let Some(place) = peers.get_mut(rank) {
            *place = Some(other);
        }
    }
    Ok(peers)
}

/// Waits until all other ranks have their channels too. Otherwise a program that ends early would end while another rank still
/// opens its channel. A rank whose channel has closed needs no channel any more.
async fn all_ready(peers: &[Option<Other>], group: GroupId, answer: Duration, until: Instant) {
    let mut waiting = JoinSet::new();
    for other in peers.iter().flatten().cloned() {
        waiting.spawn(async move {
            let mut pause = Duration::from_millis(1);
            while other.channel.is_open() && Instant::now() < until {
                if other.peer.status(&group, answer).await.is_ok_and(|status| status.ready) {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(50));
            }
        });
    }
    waiting.join_all().await;
}

/// Opens a channel. A rank that is asked by many others at once says that it is busy, and a rank that has no answer of rank 0 yet says
/// that the ranks have not met. Such a rank is asked again.
async fn open(device: &RdmaDevice, address: &str, until: Instant) -> Result<Channel, ChannelError> {
    loop {
        match device.channel(address, 0).await {
            Err(ChannelError::Refused { code: Code::ResourceExhausted | Code::Aborted, .. })
                if Instant::now() < until =>
            {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50))).await;
            }
            result => return result,
        }
    }
}

/// Waits until the channel to a rank closes. A host that vanishes closes it too, because both ends of the channel's connection
/// ping one another.
async fn watch(state: Arc<State>, rank: usize, other: Other, group: GroupId, answer: Duration) {
    // The first call connects, so that later ones, which are in a hurry, need not.
    let first = other.peer.status(&group, answer.max(Duration::from_secs(5)));
    let closed = other.channel.closed();
    tokio::pin!(closed);
    let reason = tokio::select! {
        reason = &mut closed => reason,
        _ = first => closed.await,
    };
    state.lose(rank, reason);
}

/// Returns a text that is equal for processes of one running system.
fn host() -> String {
    let read = |path| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
    read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| format!("unknown {:016x}", fastrand::u64(..)))
}

/// Returns a name that can't be guessed.
fn fresh_id() -> Result<GroupId, CollectiveError> {
    let mut id = GroupId::default();
    let read = std::fs::File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut id));
    read.map_err(|error| setup(format!("the system gives no random numbers (/dev/urandom): {error}")))?;
    Ok(id)
}
