//! Connects the parts: they join and watch one another, and open the connections over which one part sends
//! tensors to another.

use std::collections::HashMap;
use std::error::Error;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Code;
use tonic::transport::Endpoint;

use crate::error::{GraphError, Problem};
use crate::placement::{Crossing, Part, Placement};
use crate::session::settings::{
    CONNECTION_WINDOW, ListenerBuilder, MAX_CALLS, MAX_FRAME, MESSAGE_MARGIN, OTHER_CALLS, Peering,
    STREAM_WINDOW, calls,
};
use crate::session::threads::{self, FAREWELL};
use crate::session::{Addresses, Core, Listener, ModeEndpoints, Session};
use crate::transfer::proto::parts_client::PartsClient;
use crate::transfer::{
    CallEndpoints, Caller, Mailbox, Mailboxes, PeerEnd, Peers, SessionState, SlotEndpoints, SlotReceiver,
    SlotSender, TransferMode,
};
use tonic_rdma::{Policy, RdmaChannel, RdmaConnectInfo, RdmaConnector};
use tonic_rdma_tensor::unstable::bootstrap::{
    self, Bootstrap, JoinError, Key, MemberInfo, MemberStateStream, VERSION, WatchEnd, fresh_key,
};
use tonic_rdma_tensor::unstable::preallocate_slots;
use tonic_rdma_tensor::{Channel, RdmaDevice, TensorErrorKind};
use tonic_rdma_verbs::unstable::{chain, with_causes};

/// The longest message of gRPC: its length has 32 bits.
const LONGEST_MESSAGE: u64 = u32::MAX as u64;

/// What the tasks that connect have in common.
struct Context {
    settings: ListenerBuilder,
    peering: Peering,
    state: Arc<SessionState>,
    device: RdmaDevice,
    until: Instant,
}

/// Connects, and tells the other parts if that fails.
pub(super) fn connect(listener: Listener, peering: Peering) -> Result<Session, GraphError> {
    let Listener { address, settings, threads, cell, service, device } = listener;
    check(&settings, &peering)?;
    let parts = peering.peers.len();
    let keys: Result<Vec<Key>, _> = (0..parts).map(|_| fresh_key()).collect();
    let no_random =
        |error| GraphError::of_setting("key", format!("the system gives no random bytes: {error}"));
    let keys = keys.map_err(no_random)?;
    let peers = Arc::new(Peers::new(parts));
    // Slots and mailboxes exist before another part can call this one.
    let (mut ends, mailboxes) = receivers(&device, &peering, &keys, &peers)?;
    let (common, address) = (peering.common(), address.to_string());
    let (noun, number, size) = ("part", peering.part.0, parts);
    let info = MemberInfo { noun, number, size, common, address, about: Default::default() };
    let bootstrap = Arc::new(Bootstrap::new(info, Some(keys)).map_err(no_random)?);
    let (me, modes, window) = (peering.part, peering.modes.clone(), peering.window);
    let state = SessionState { me, parts, modes: modes.clone(), window, bootstrap, mailboxes, peers };
    let state = Arc::new(state);
    // A listener connects once, because connecting takes it.
    _ = service.0.set(Arc::clone(&state));
    _ = cell.set(Arc::clone(&state.bootstrap));
    let until = Instant::now() + peering.timeout;
    let copies = settings.copies;
    let context = Context { settings, peering, state: Arc::clone(&state), device: device.clone(), until };
    let connected = threads::run(&threads.handle, connect_all(Arc::new(context)));
    let (sending, addresses) = connected.inspect_err(|error| {
        state.bootstrap.fail(&chain(error));
        // A program may end after such an error, so the other parts hear why for a moment.
        threads::say_why(&threads.cell, FAREWELL, || false);
    })?;
    let mut channels = Vec::new();
    for Sending { channel, calls, slots } in sending {
        channels.extend(channel);
        for (mode, sender) in calls {
            if let Some(ModeEndpoints::Calls(ends)) = ends.get_mut(&mode) {
                ends.senders.push(sender);
            }
        }
        for (mode, sender) in slots {
            if let Some(ModeEndpoints::Slots(ends)) = ends.get_mut(&mode) {
                ends.senders.push(sender);
            }
        }
    }
    let core = Arc::new(Core { state, _channels: channels, device, threads });
    Ok(Session { core, modes, ends: Mutex::new(ends), addresses, copies })
}

/// Checks the numbers of the peering against the settings.
fn check(settings: &ListenerBuilder, peering: &Peering) -> Result<(), GraphError> {
    peering.check()?;
    let calls = peering.modes.iter().find(|mode| !mode.uses_slots());
    if let Some(mode) = calls {
        let most = (MAX_CALLS - OTHER_CALLS) as usize;
        for peer in (0..peering.peers.len()).map(Part) {
            let sent =
                peering.placements.leaving(peering.part).filter(|crossing| crossing.to == peer).count();
            if sent.saturating_mul(peering.window) > most {
                let reason = format!(
                    "{sent} crossing tensors go to part {peer}, and {} of each may be under way; mode {mode} carries {most} tensors at a time to a part",
                    peering.window
                );
                return Err(GraphError::of_setting("window", reason));
            }
        }
    }
    let longest = settings.largest_tensor.min(LONGEST_MESSAGE - MESSAGE_MARGIN);
    for crossing in peering.placements.crossings() {
        if let (Placement::Static(spec), Some(mode)) = (&crossing.placement, calls) {
            let bytes = spec.bytes().unwrap_or(0);
            if bytes > longest {
                let name = &crossing.name;
                let reason = format!(
                    "crossing tensor {name:?} has {bytes} bytes, and a message of {mode} takes {longest}"
                );
                return Err(GraphError::of_setting("largest_tensor", reason));
            }
        }
    }
    Ok(())
}

/// Makes the slots and mailboxes of the crossing tensors that arrive here. The senders come later.
fn receivers(
    device: &RdmaDevice,
    peering: &Peering,
    keys: &[Key],
    peers: &Peers,
) -> Result<(HashMap<TransferMode, ModeEndpoints>, Mailboxes), GraphError> {
    let (mut ends, mut mailboxes) = (HashMap::new(), HashMap::new());
    let window = peering.window;
    let of_mode =
        |mode: &TransferMode| peering.placements.slot_lengths(peering.part, window, mode.has_static_slots());
    let slots = peering.modes.iter().filter(|mode| mode.uses_slots()).flat_map(of_mode);
    preallocate_slots(device, slots).map_err(|error| {
        let reason = format!("there is no registered memory for the slots of this part: {error}");
        GraphError::of_setting("memory", reason)
    })?;
    for mode in peering.modes.iter().copied() {
        let arriving = peering.placements.arriving(peering.part);
        let of_mode = if mode.uses_slots() {
            let slots = arriving.map(|crossing| slot(device, peering, keys, mode, crossing));
            ModeEndpoints::Slots(SlotEndpoints {
                senders: vec![],
                receivers: slots.collect::<Result<_, _>>()?,
            })
        } else {
            let mut received = Vec::new();
            for crossing in arriving {
                let mailbox = Arc::new(Mailbox::new(&crossing.name, window, peers.cell()));
                received.push((crossing.clone(), Arc::clone(&mailbox)));
                mailboxes.insert((mode, crossing.id.0), (crossing.clone(), mailbox));
            }
            ModeEndpoints::Calls(CallEndpoints { mode, window, senders: vec![], mailboxes: received })
        };
        ends.insert(mode, of_mode);
    }
    Ok((ends, mailboxes))
}

/// Makes the slot of a crossing tensor that arrives here.
fn slot(
    device: &RdmaDevice,
    peering: &Peering,
    keys: &[Key],
    mode: TransferMode,
    crossing: &Crossing,
) -> Result<(Crossing, SlotReceiver), GraphError> {
    let name = slot_name(&keys[crossing.from.0], mode, crossing);
    let depth = peering.window as u32;
    let receiver = match &crossing.placement {
        Placement::Static(spec) if mode.has_static_slots() => {
            device.static_receiver(&name, spec, depth).map(SlotReceiver::Static)
        }
        _ => device.dynamic_receiver(&name, depth).map(SlotReceiver::Dynamic),
    };
    let receiver = receiver.map_err(|error| {
        GraphError::of_setting(
            "window",
            format!("no slot with {depth} buffers for crossing tensor {:?}: {error}", crossing.name),
        )
    })?;
    Ok((crossing.clone(), receiver))
}

async fn connect_all(context: Arc<Context>) -> Result<(Vec<Sending>, Addresses), GraphError> {
    let (peering, state) = (&context.peering, &context.state);
    let keys = for_each_peer(&context, |context, peer| async move {
        let state = Arc::clone(&context.state);
        let (key, stream) = join(&context, peer).await?;
        tokio::spawn(follow(state, peer, stream));
        Ok(key)
    })
    .await?;
    let keys: Arc<HashMap<Part, Key>> = Arc::new(keys.into_iter().collect());
    let sending = for_each_peer(&context, |context, peer| {
        let keys = Arc::clone(&keys);
        async move {
            let Some(key) = keys.get(&peer) else { return Ok(Sending::default()) };
            let Context { settings, device, peering, .. } = &*context;
            let opening = tokio::time::timeout_at(
                context.until,
                open(PeerContext { settings, device, peering, peer, key }),
            );
            let late = |_| late(&context, peer, "its connections for tensors are not open".to_owned());
            unless_peer_fails(&context.state, async { opening.await.map_err(late)? }).await
        }
    })
    .await?;
    let mut learned = vec![0; peering.peers.len()];
    for (peer, sending) in &sending {
        learned[peer.0] = sending.static_slots() as u64;
    }
    state.bootstrap.standing.send_modify(|standing| {
        standing.ready = true;
        standing.details.addresses.clone_from(&learned);
    });
    let late = |part| late(&context, Part(part), "it is not ready yet".to_owned());
    unless_peer_fails(state, async { state.bootstrap.all_ready(context.until).await.map_err(late) }).await?;
    let given = addresses_given(&context)?;
    let learned = learned.iter().sum::<u64>() as usize;
    let sending = sending.into_iter().map(|(_, sending)| sending).collect();
    Ok((sending, Addresses { learned, given }))
}

/// Joins a part, and begins to watch it.
async fn join(context: &Context, peer: Part) -> Result<(Key, MemberStateStream), GraphError> {
    let (state, address) = (&context.state, context.peering.address(peer));
    let channel = endpoint(peer, address)?.connect_lazy();
    let joining = state.bootstrap.join(channel.clone(), peer.0, false, context.until);
    let joined = unless_peer_fails(state, async { Ok(joining.await) }).await?;
    let key = joined.map_err(|reason| not_joined(context, peer, reason))?.key;
    let stream = state.bootstrap.watch(channel, &key, context.until).await.map_err(|status| {
        let source = with_causes(status.message(), &status).into();
        Problem::PeerLost { peer: peer.0, source }
    })?;
    Ok((key, stream))
}

/// Follows the state of a part until the part has left, has failed or is lost.
async fn follow(state: Arc<SessionState>, peer: Part, stream: MemberStateStream) {
    let said = || {
        state.compare_runs(peer);
        state.peers.wake_transfers();
    };
    match state.bootstrap.follow(peer.0, stream, said).await {
        WatchEnd::Left => state.peers.has_left(peer),
        WatchEnd::Failed(reason) => state.peers.ended(peer, PeerEnd::Failed(reason)),
        WatchEnd::Lost(reason) => state.peers.ended(peer, PeerEnd::Lost(reason)),
    }
}

/// Carries out `work` for all other parts at once. The first error ends it.
async fn for_each_peer<T, F>(
    context: &Arc<Context>,
    work: impl Fn(Arc<Context>, Part) -> F,
) -> Result<Vec<(Part, T)>, GraphError>
where
    T: Send + 'static,
    F: Future<Output = Result<T, GraphError>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for peer in (0..context.peering.peers.len()).map(Part).filter(|peer| *peer != context.state.me) {
        let working = work(Arc::clone(context), peer);
        tasks.spawn(async move { working.await.map(|done| (peer, done)) });
    }
    let mut all = Vec::new();
    while let Some(done) = tasks.join_next().await {
        let ended =
            |error| GraphError::of_setting("threads", format!("a task of the session has ended: {error}"));
        all.push(done.map_err(ended)??);
    }
    Ok(all)
}

/// Carries out `work`, and stops it if a part fails or is lost.
async fn unless_peer_fails<T>(
    state: &SessionState,
    work: impl Future<Output = Result<T, GraphError>>,
) -> Result<T, GraphError> {
    let heard = state.peers.cell();
    let trouble = poll_fn(|context| {
        // Set before the check, so that no later change is missed.
        heard.set(context.waker());
        state.peers.check_all().err().map_or(Poll::Pending, Poll::Ready)
    });
    tokio::select! {
        biased;
        done = work => done,
        error = trouble => Err(error),
    }
}

/// Returns the number of static slots here whose address the other parts have.
fn addresses_given(context: &Context) -> Result<usize, GraphError> {
    let Context { peering, state, .. } = context;
    let me = state.me;
    let slots = peering.modes.iter().filter(|mode| mode.has_static_slots()).count();
    let mut given = 0;
    for part in (0..state.parts).filter(|part| *part != me.0) {
        let arriving = peering.placements.arriving(me);
        let expected = slots * arriving.filter(|it| it.from.0 == part && it.placement.is_static()).count();
        let found = state.bootstrap.of(part, |other| other.details.addresses.get(me.0).copied());
        let found = found.flatten().unwrap_or(0);
        if found != expected as u64 {
            let reason = format!("it has the addresses of {found} of the {expected} static slots here");
            return Err(Problem::PeerFailed { peer: part, reason }.into());
        }
        given += expected;
    }
    Ok(given)
}

fn late(context: &Context, peer: Part, reason: String) -> GraphError {
    let (address, seconds) =
        (context.peering.address(peer).to_owned(), context.peering.timeout.as_secs_f64());
    GraphError::from(Problem::Unreachable { peer: peer.0, address, seconds, reason })
}

/// Makes the error of a part that this one could not join.
fn not_joined(context: &Context, part: Part, reason: JoinError) -> GraphError {
    let (peer, address) = (part.0, context.peering.address(part).to_owned());
    match reason {
        JoinError::Version(theirs) => {
            GraphError::from(Problem::Version { peer, address, ours: VERSION, theirs })
        }
        JoinError::Differs(what) => GraphError::from(Problem::Differs { peer, address, what }),
        JoinError::Other(other) => GraphError::of_setting(
            "peers",
            format!("part {other} answers at {address}, the address of part {part}"),
        ),
        JoinError::Refused(reason) => {
            GraphError::of_setting("part", format!("part {part} at {address} refused this part: {reason}"))
        }
        JoinError::Failed(reason) => GraphError::from(Problem::PeerFailed { peer, reason }),
        JoinError::Late { trouble, .. } => late(context, part, trouble),
    }
}

/// What is needed to connect to one part.
#[derive(Clone, Copy)]
pub(super) struct PeerContext<'a> {
    pub(super) settings: &'a ListenerBuilder,
    pub(super) device: &'a RdmaDevice,
    pub(super) peering: &'a Peering,
    pub(super) peer: Part,
    pub(super) key: &'a Key,
}

/// What this part needs to send to another.
#[derive(Debug, Default)]
pub(super) struct Sending {
    pub(super) channel: Option<Channel>,
    pub(super) calls: Vec<(TransferMode, (Crossing, Caller, Bytes))>,
    pub(super) slots: Vec<(TransferMode, (Crossing, SlotSender))>,
}

impl Sending {
    /// Returns the number of static slots whose address is known.
    fn static_slots(&self) -> usize {
        self.slots.iter().filter(|(_, (_, sender))| matches!(sender, SlotSender::Static(_))).count()
    }
}

/// Returns the name of a slot. The key of the sender in it is a secret, so that only the sender finds the
/// slot.
fn slot_name(key: &Key, mode: TransferMode, crossing: &Crossing) -> String {
    format!("{:032x}/{mode}/{}", u128::from_be_bytes(*key), crossing.id.0)
}

/// Makes the description of a connection to `address`: windows and frames for tensors.
pub(super) fn endpoint(peer: Part, address: &str) -> Result<Endpoint, GraphError> {
    let endpoint = bootstrap::endpoint("http", address);
    let endpoint = endpoint
        .map_err(|reason| GraphError::of_setting("peers", format!("the address of part {peer}: {reason}")))?;
    Ok(endpoint
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME))
}

/// Opens the connections of all modes to a part to which this part sends.
pub(super) async fn open(context: PeerContext<'_>) -> Result<Sending, GraphError> {
    let mut sending = Sending::default();
    let peering = context.peering;
    let leaving: Vec<&Crossing> =
        peering.placements.leaving(peering.part).filter(|crossing| crossing.to == context.peer).collect();
    if leaving.is_empty() {
        return Ok(sending);
    }
    for mode in peering.modes.iter().copied() {
        if mode.uses_slots() {
            let channel = match sending.channel.take() {
                Some(channel) => channel,
                None => channel(context, mode).await?,
            };
            for (queue_pair, crossing) in (0..).zip(&leaving) {
                // The queue pairs take the crossing tensors in turn.
                let sender = attach(context, &channel.over(queue_pair), mode, crossing).await?;
                sending.slots.push((mode, ((*crossing).clone(), sender)));
            }
            sending.channel = Some(channel);
        } else {
            let caller = caller(context, mode).await?;
            let key = Bytes::copy_from_slice(context.key);
            let senders = leaving.iter().map(|it| ((*it).clone(), caller.clone(), key.clone()));
            sending.calls.extend(senders.map(|sender| (mode, sender)));
        }
    }
    Ok(sending)
}

impl PeerContext<'_> {
    fn no_rdma(&self, mode: TransferMode, source: Box<dyn Error + Send + Sync>) -> GraphError {
        GraphError::from(Problem::NoRdma {
            mode: mode.to_string(),
            peer: self.peer.0,
            address: self.peering.address(self.peer).to_owned(),
            source,
        })
    }
}

/// Connects for calls in `mode`.
async fn caller(context: PeerContext<'_>, mode: TransferMode) -> Result<Caller, GraphError> {
    let endpoint = endpoint(context.peer, context.peering.address(context.peer))?;
    let config = context.settings.with_policy(Policy::Require);
    let longest = usize::try_from(context.settings.largest_tensor.saturating_add(MESSAGE_MARGIN));
    let longest = longest.unwrap_or(usize::MAX);
    match mode {
        TransferMode::GrpcNative => {
            let builder = RdmaChannel::builder(endpoint).config(config).calls(calls(context.settings));
            let channel = builder.connect().await.map_err(|error| context.no_rdma(mode, error.into()))?;
            let info = channel.last_connection();
            if !info.as_ref().is_some_and(|info| info.is_native()) {
                return Err(context.no_rdma(mode, no_connection(info.as_ref())));
            }
            Ok(Caller::Native(PartsClient::new(channel).max_encoding_message_size(longest)))
        }
        TransferMode::GrpcRdma => {
            let connector = RdmaConnector::new().config(config);
            let connecting = endpoint.connect_with_connector(connector.clone());
            let channel = connecting.await.map_err(|error| context.no_rdma(mode, error.into()))?;
            let info = connector.last_connection();
            if info.as_ref().and_then(RdmaConnectInfo::provider).is_none() {
                return Err(context.no_rdma(mode, no_connection(info.as_ref())));
            }
            Ok(Caller::Http2(PartsClient::new(channel).max_encoding_message_size(longest)))
        }
        TransferMode::GrpcTcp
        | TransferMode::RdmaCp
        | TransferMode::RdmaZerocp
        | TransferMode::RdmaInPlace => {
            let channel = endpoint.connect().await;
            let lost =
                |error| GraphError::from(Problem::PeerLost { peer: context.peer.0, source: Box::new(error) });
            Ok(Caller::Http2(PartsClient::new(channel.map_err(lost)?).max_encoding_message_size(longest)))
        }
    }
}

/// Returns why a connection is not of the asked kind.
fn no_connection(info: Option<&RdmaConnectInfo>) -> Box<dyn Error + Send + Sync> {
    let reason = info.map_or("no connection was made", RdmaConnectInfo::reason);
    reason.into()
}

/// Opens a channel to the part's tensor device. Tries again while the device answers that it is busy, because
/// many parts call it at once.
async fn channel(context: PeerContext<'_>, mode: TransferMode) -> Result<Channel, GraphError> {
    loop {
        match context.device.channel(context.peering.address(context.peer), 0).await {
            Ok(channel) => return Ok(channel),
            Err(error) if error.code() == Some(Code::ResourceExhausted) => {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50))).await;
            }
            Err(error) if matches!(error.kind(), TensorErrorKind::PeerLost | TensorErrorKind::Closed) => {
                return Err(Problem::PeerLost { peer: context.peer.0, source: Box::new(error) }.into());
            }
            Err(error) => return Err(context.no_rdma(mode, Box::new(error))),
        }
    }
}

/// Learns the address of a slot.
async fn attach(
    context: PeerContext<'_>,
    channel: &Channel,
    mode: TransferMode,
    crossing: &Crossing,
) -> Result<SlotSender, GraphError> {
    let name = slot_name(context.key, mode, crossing);
    let sender = match &crossing.placement {
        Placement::Static(spec) if mode.has_static_slots() => {
            channel.static_sender(&name, spec).await.map(SlotSender::Static)
        }
        _ => channel.dynamic_sender(&name).await.map(SlotSender::Dynamic),
    };
    sender.map_err(|error| match error.kind() {
        TensorErrorKind::PeerLost | TensorErrorKind::Closed => {
            GraphError::from(Problem::PeerLost { peer: context.peer.0, source: Box::new(error) })
        }
        _ => crossing.failed(context.peer, 0, error),
    })
}
