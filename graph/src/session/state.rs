//! What the service of a part knows of its session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use tokio::sync::watch;
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

use crate::placement::{Crossing, Part};
use crate::session::fingerprint::Fingerprint;
use crate::session::peering::Peering;
use crate::session::text::shortened;
use crate::transfer::proto::{Description, Hash, PutRequest, Standing};
use crate::transfer::{Mailbox, Mode, Parcel, Peers};
use tonic_rdma_verbs::internal::lock;

/// The version of the calls between parts.
pub(super) const VERSION: u32 = 2;

/// A secret of one part and one of its peers.
pub(super) type Token = [u8; 16];

/// The service's view of the process: a part that may not have begun to connect.
#[derive(Debug, Default)]
pub(super) struct Hall {
    state: OnceLock<Arc<State>>,
}

/// A part that connects, or is connected.
#[derive(Debug)]
pub(super) struct State {
    pub(super) me: Part,
    pub(super) parts: usize,
    pub(super) fingerprint: Fingerprint,
    pub(super) modes: Vec<Mode>,
    pub(super) window: usize,
    /// The tokens that this part gives to the others, by part.
    pub(super) tokens: Vec<Token>,
    pub(super) mailboxes: HashMap<(Mode, usize), (Crossing, Arc<Mailbox>)>,
    pub(super) peers: Arc<Peers>,
    /// What this part tells the others of itself.
    pub(super) standing: watch::Sender<Standing>,
    /// What the other parts say of themselves.
    pub(super) others: watch::Sender<Vec<Standing>>,
    /// What the other parts said of themselves when they called last, if it does not fit.
    misfits: Mutex<HashMap<usize, Misfit>>,
    /// Which parts have heard how this part ended, or have ended themselves.
    heard: Mutex<Vec<bool>>,
}

/// The reason why two parts can't run together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Misfit {
    Version(u32),
    Differs(String),
}

impl Hall {
    /// Begins to answer the other parts.
    pub(super) fn open(&self, state: Arc<State>) {
        // A listener connects once, because connecting takes it.
        _ = self.state.set(state);
    }

    pub(super) fn state(&self) -> Option<&Arc<State>> {
        self.state.get()
    }
}

impl State {
    pub(super) fn new(
        peering: &Peering,
        tokens: Vec<Token>,
        mailboxes: HashMap<(Mode, usize), (Crossing, Arc<Mailbox>)>,
        peers: Arc<Peers>,
    ) -> Self {
        Self {
            me: peering.part,
            parts: peering.peers.len(),
            fingerprint: peering.fingerprint.clone(),
            modes: peering.modes.clone(),
            window: peering.window,
            tokens,
            mailboxes,
            peers,
            standing: watch::Sender::new(Standing::default()),
            others: watch::Sender::new(vec![Standing::default(); peering.peers.len()]),
            misfits: Mutex::default(),
            heard: Mutex::new((0..peering.peers.len()).map(|part| part == peering.part.0).collect()),
        }
    }

    /// Tells the other parts that this part has failed. Only the first reason counts.
    pub(super) fn fail(&self, reason: &str) {
        self.standing.send_if_modified(|standing| {
            let first = standing.failure.is_none();
            standing.failure.get_or_insert_with(|| shortened(reason));
            first
        });
    }

    /// Notes that a part has heard how this part ended, or has ended itself.
    pub(super) fn has_heard(&self, part: Option<usize>) {
        let mut all = lock(&self.heard);
        if let Some(heard) = part.and_then(|part| all.get_mut(part)) {
            *heard = true;
        }
    }

    /// Returns whether this part has failed, and another part has not heard why.
    pub(super) fn has_to_say_why(&self) -> bool {
        self.standing.borrow().failure.is_some() && lock(&self.heard).contains(&false)
    }

    /// Describes this part.
    pub(super) fn description(&self) -> Description {
        let hashes = self.fingerprint.entries().iter();
        Description {
            version: VERSION,
            part: self.me.0 as u32,
            parts: self.parts as u32,
            fingerprint: hashes.map(|(name, hash)| Hash { name: name.clone(), hash: *hash }).collect(),
            modes: self.modes.iter().map(|mode| mode.number()).collect(),
            window: self.window as u32,
        }
    }

    /// Compares another part with this one.
    pub(super) fn compare(&self, other: &Description) -> Result<(), Misfit> {
        if other.version != VERSION {
            return Err(Misfit::Version(other.version));
        }
        let hashes: Vec<(String, u64)> =
            other.fingerprint.iter().map(|entry| (entry.name.clone(), entry.hash)).collect();
        let ours = self.description();
        let settings = [
            ("the number of parts", ours.parts == other.parts),
            ("the modes", ours.modes == other.modes),
            ("the window", ours.window == other.window),
        ];
        let mut differences: Vec<String> = self.fingerprint.difference(&hashes).into_iter().collect();
        differences.extend(settings.iter().filter(|(_, same)| !same).map(|(name, _)| (*name).to_owned()));
        if differences.is_empty() { Ok(()) } else { Err(Misfit::Differs(differences.join(", "))) }
    }

    /// Notes that a part that called does not fit.
    pub(super) fn note(&self, part: usize, misfit: Misfit) {
        if part < self.parts && part != self.me.0 {
            lock(&self.misfits).insert(part, misfit);
        }
    }

    /// Notes that a part that called fits.
    pub(super) fn fits(&self, part: usize) {
        lock(&self.misfits).remove(&part);
    }

    /// Returns why a part that called does not fit.
    pub(super) fn misfit(&self, part: Part) -> Option<Misfit> {
        lock(&self.misfits).get(&part.0).cloned()
    }

    /// Returns the token for a part.
    pub(super) fn token_of(&self, part: usize) -> Option<Bytes> {
        self.tokens.get(part).map(|token| Bytes::copy_from_slice(token))
    }

    /// Returns the part that has a token.
    pub(super) fn caller(&self, token: &[u8]) -> Option<Part> {
        let found = self.tokens.iter().position(|ours| ours[..] == *token)?;
        (found != self.me.0).then_some(Part(found))
    }

    /// Checks a tensor that came by a call of `caller`.
    pub(super) fn check(&self, caller: Part, request: PutRequest) -> Result<(Arc<Mailbox>, Parcel), String> {
        let me = self.me;
        let mode = Mode::of_number(request.mode).filter(|mode| self.modes.contains(mode));
        let mode = mode.ok_or_else(|| format!("mode {} is not one of this session", request.mode))?;
        if mode.uses_slots() {
            return Err(format!("no call brings a tensor in mode {mode}"));
        }
        let number = usize::try_from(request.crossing).ok();
        let found = number.and_then(|number| self.mailboxes.get(&(mode, number)));
        let found = found.filter(|(crossing, _)| crossing.from == caller);
        let (crossing, mailbox) = found.ok_or_else(|| {
            format!("no crossing tensor {} goes from part {caller} to part {me}", request.crossing)
        })?;
        let named = |reason: String| format!("crossing tensor {:?}: {reason}", crossing.name);
        let dtype: Dtype = request.dtype.parse().map_err(|_| named("its type is unknown".to_owned()))?;
        let shape = Shape::new(&request.dims).map_err(|error| named(error.to_string()))?;
        let spec = TensorSpec::new(dtype, shape).map_err(|error| named(error.to_string()))?;
        crossing.placement.check(&spec).map_err(|error| named(error.to_string()))?;
        let bytes = spec.bytes().ok_or_else(|| named(format!("{spec} has no fixed length")))?;
        if bytes != request.content.len() as u64 {
            return Err(named(format!("{spec} has {bytes} bytes, not {}", request.content.len())));
        }
        let parcel = Parcel { step: request.step, spec, content: request.content };
        Ok((Arc::clone(mailbox), parcel))
    }
}
