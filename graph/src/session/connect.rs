//! Connects the parts.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic_rdma_tensor::RdmaDevice;
use tonic_rdma_verbs::internal::chain;

use crate::error::GraphError;
use crate::placement::{Crossing, Part, Placement};
use crate::session::connected::{Addresses, Core, Ends, Session};
use crate::session::control::{Met, follow, meet, watch as open_watch};
use crate::session::links::{self, Plan, Sending};
use crate::session::peering::Peering;
use crate::session::settings::{MAX_CALLS, MESSAGE_MARGIN, OTHER_CALLS, Settings, setting};
use crate::session::state::{Hall, State, Token};
use crate::session::threads::{FAREWELL, Threads};
use crate::transfer::proto::Standing;
use crate::transfer::{CallEnds, Mailbox, Mode, Peers, SlotEnds, SlotReceiver};

/// The longest message of gRPC: its length has 32 bits.
const LONGEST_MESSAGE: u64 = u32::MAX as u64;

/// What the tasks that connect have in common.
struct Context {
    settings: Settings,
    peering: Peering,
    state: Arc<State>,
    device: RdmaDevice,
    until: Instant,
}

/// Connects, and tells the other parts if that fails.
pub(super) fn connect(
    settings: Settings,
    threads: Threads,
    hall: &Hall,
    device: RdmaDevice,
    peering: Peering,
) -> Result<Session, GraphError> {
    check(&settings, &peering)?;
    let parts = peering.peers.len();
    let peers = Arc::new(Peers::new(parts));
    let tokens = tokens(parts)?;
    // Slots and mailboxes are there before another part hears of this one.
    let mut mailboxes = HashMap::new();
    let mut ends = HashMap::new();
    for mode in &peering.modes {
        let arriving = peering.placements.arriving(peering.part);
        if mode.uses_slots() {
            let slots = arriving.map(|crossing| slot(&device, &peering, &tokens, *mode, crossing));
            ends.insert(
                *mode,
                Ends::Slots(SlotEnds { senders: vec![], receivers: slots.collect::<Result<_, _>>()? }),
            );
        } else {
            let mut received = Vec::new();
            for crossing in arriving {
                let mailbox = Arc::new(Mailbox::new(&crossing.name, peering.window, peers.cell()));
                received.push((crossing.clone(), Arc::clone(&mailbox)));
                mailboxes.insert((*mode, crossing.id.0), (crossing.clone(), mailbox));
            }
            let (mode, window) = (*mode, peering.window);
            ends.insert(mode, Ends::Calls(CallEnds { mode, window, senders: vec![], mailboxes: received }));
        }
    }
    let state = State::new(&peering, tokens, mailboxes, peers);
    let state = Arc::new(state);
    hall.open(Arc::clone(&state));
    let until = Instant::now() + peering.timeout;
    let modes = peering.modes.clone();
    let copies = settings.copies;
    let context = Context { settings, peering, state: Arc::clone(&state), device: device.clone(), until };
    let connected = threads.run(connect_all(Arc::new(context)));
    let Connected { sending, addresses } = match connected {
        Ok(connected) => connected,
        Err(error) => {
            state.fail(&chain(&error));
            threads.fail_within(FAREWELL);
            return Err(error);
        }
    };
    let mut channels = Vec::new();
    for Sending { channel, calls, slots } in sending {
        channels.extend(channel);
        for (mode, sender) in calls {
            if let Some(Ends::Calls(ends)) = ends.get_mut(&mode) {
                ends.senders.push(sender);
            }
        }
        for (mode, sender) in slots {
            if let Some(Ends::Slots(ends)) = ends.get_mut(&mode) {
                ends.senders.push(sender);
            }
        }
    }
    let core = Arc::new(Core { state, channels, device, threads });
    Ok(Session { core, modes, ends: Mutex::new(ends), addresses, copies })
}

/// Checks the numbers of the peering against the settings.
fn check(settings: &Settings, peering: &Peering) -> Result<(), GraphError> {
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
                return Err(setting("window", reason));
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
                return Err(setting("largest_tensor", reason));
            }
        }
    }
    Ok(())
}

/// Makes the secrets of this part and each other part.
fn tokens(parts: usize) -> Result<Vec<Token>, GraphError> {
    let mut tokens = Vec::with_capacity(parts);
    for _ in 0..parts {
        let mut token = Token::default();
        let filled = rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty());
        // The system fills up to 256 bytes at once.
        filled.map_err(|error| setting("token", format!("the system gives no random bytes: {error}")))?;
        tokens.push(token);
    }
    Ok(tokens)
}

/// Makes the slot of a crossing tensor that arrives here.
fn slot(
    device: &RdmaDevice,
    peering: &Peering,
    tokens: &[Token],
    mode: Mode,
    crossing: &Crossing,
) -> Result<(Crossing, SlotReceiver), GraphError> {
    let name = links::slot_name(&tokens[crossing.from.0], mode, crossing);
    let depth = peering.window as u32;
    let receiver = match &crossing.placement {
        Placement::Static(spec) => device.static_receiver(&name, spec, depth).map(SlotReceiver::Static),
        Placement::Dynamic { .. } => device.dynamic_receiver(&name, depth).map(SlotReceiver::Dynamic),
    };
    let receiver = receiver.map_err(|error| {
        setting(
            "window",
            format!("no slot with {depth} buffers for crossing tensor {:?}: {error}", crossing.name),
        )
    })?;
    Ok((crossing.clone(), receiver))
}

/// What [`connect_all`] makes.
struct Connected {
    sending: Vec<Sending>,
    addresses: Addresses,
}

async fn connect_all(context: Arc<Context>) -> Result<Connected, GraphError> {
    let met = for_each_peer(&context, |context, peer| async move {
        let peering = &context.peering;
        let address = peering.peers.get(peer.0).cloned().unwrap_or_default();
        let (state, limit) = (Arc::clone(&context.state), peering.timeout);
        let met = meet(state, peer, address, limit, context.until).await?;
        let stream = open_watch(&met, peer, context.until).await?;
        tokio::spawn(follow(Arc::clone(&context.state), peer, stream));
        Ok(met)
    })
    .await?;
    let met: Arc<HashMap<Part, Met>> = Arc::new(met.into_iter().collect());
    let sending = for_each_peer(&context, |context, peer| {
        let met = Arc::clone(&met);
        async move {
            let Some(met) = met.get(&peer) else { return Ok(Sending::default()) };
            let plan = Plan {
                settings: &context.settings,
                device: &context.device,
                peering: &context.peering,
                peer,
                token: &met.token,
            };
            let limit = context.peering.timeout;
            let changes = context.state.peers.changes();
            tokio::select! {
                opened = tokio::time::timeout_at(context.until, links::open(plan)) => match opened {
                    Ok(sending) => sending,
                    Err(_) => Err(late(&context, peer, limit, "its connections for tensors are not open")),
                },
                error = trouble(&context.state, changes) => Err(error),
            }
        }
    })
    .await?;
    let mut learned = vec![0; context.peering.peers.len()];
    for (peer, sending) in &sending {
        learned[peer.0] = sending.static_slots() as u64;
    }
    let addresses = learned.clone();
    context.state.standing.send_modify(|standing| {
        standing.ready = true;
        standing.addresses = addresses;
    });
    let given = all_ready(&context).await?;
    let learned = learned.iter().sum::<u64>() as usize;
    let sending = sending.into_iter().map(|(_, sending)| sending).collect();
    Ok(Connected { sending, addresses: Addresses { learned, given } })
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
        let ended = |error| setting("threads", format!("a task of the session has ended: {error}"));
        all.push(done.map_err(ended)??);
    }
    Ok(all)
}

/// Waits until a part has failed or is lost.
async fn trouble(state: &State, mut changes: watch::Receiver<u64>) -> GraphError {
    loop {
        if let Err(error) = state.peers.check_all() {
            return error;
        }
        if changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Waits until all other parts are ready. Returns the number of static slots here whose address they have.
async fn all_ready(context: &Context) -> Result<usize, GraphError> {
    let mut others = context.state.others.subscribe();
    let changes = context.state.peers.changes();
    let missing = |others: &[Standing]| {
        let others = others.iter().enumerate().filter(|(part, _)| *part != context.state.me.0);
        others.filter(|(_, other)| !other.ready).map(|(part, _)| Part(part)).next()
    };
    let ready = async {
        while missing(&others.borrow_and_update()).is_some() {
            if others.changed().await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        biased;
        () = ready => {}
        error = trouble(&context.state, changes) => return Err(error),
        () = tokio::time::sleep_until(context.until) => {
            let late_part = missing(&context.state.others.borrow()).unwrap_or(context.state.me);
            return Err(late(context, late_part, context.peering.timeout, "it is not ready yet"));
        }
    }
    let mut given = 0;
    for (part, other) in context.state.others.borrow().iter().enumerate() {
        let slots = context.peering.modes.iter().filter(|mode| mode.uses_slots()).count();
        let arriving = context.peering.placements.arriving(context.state.me);
        let expected = slots * arriving.filter(|it| it.from.0 == part && it.placement.is_static()).count();
        let found = other.addresses.get(context.state.me.0).copied().unwrap_or(0);
        if part != context.state.me.0 && found != expected as u64 {
            let reason = format!("it has the addresses of {found} of the {expected} static slots here");
            return Err(GraphError::PeerFailed { peer: part, reason });
        }
        given += expected;
    }
    Ok(given)
}

fn late(context: &Context, peer: Part, limit: Duration, reason: &str) -> GraphError {
    let address = context.peering.peers.get(peer.0).cloned().unwrap_or_default();
    let (seconds, reason) = (limit.as_secs_f64(), reason.to_owned());
    GraphError::Unreachable { peer: peer.0, address, seconds, reason }
}
