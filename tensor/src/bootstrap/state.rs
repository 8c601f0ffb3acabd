//! The state of a member's bootstrap, shared by the service and the calls to other members.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use prost::Message;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Status;
use tonic_rdma_verbs::unstable::lock;

use crate::bootstrap::members::{JoinError, MemberTable, VERSION};
use crate::bootstrap::proto::{self, JoinRequest, Member};

/// A secret that all members of a bootstrap share, or two of them.
pub type Key = [u8; 16];

/// The bootstrap that the service of this process serves, once it is set.
pub type BootstrapCell<D> = Arc<OnceLock<Arc<Bootstrap<D>>>>;

/// The longest text of another member that this one keeps or passes on, in bytes.
const MAX_TEXT: usize = 4096;

/// A process that takes part in a bootstrap.
#[derive(Debug)]
pub struct MemberInfo {
    /// What the members are, for messages: `rank` or `part`.
    pub noun: &'static str,
    /// The number of this member.
    pub number: usize,
    /// The number of all members.
    pub size: usize,
    /// What all members must have in common: names and values.
    pub common: HashMap<String, String>,
    /// Where this member listens.
    pub address: String,
    /// What else the others need to know of it.
    pub about: Bytes,
}

/// A bootstrap, as one member sees it. `D` is what members report to one another by the watch.
#[derive(Debug)]
pub struct Bootstrap<D> {
    pub(super) noun: &'static str,
    /// The request by which this member joins others.
    pub(super) me: JoinRequest,
    /// The keys that this member gives to the others, by number.
    keys: OnceLock<Vec<Key>>,
    /// Whether others join this member.
    is_joined: bool,
    pub(super) table: watch::Sender<MemberTable>,
    /// The state of this member, which the others follow.
    pub standing: watch::Sender<MemberState<D>>,
    /// The states of the other members, as they reported them.
    pub others: watch::Sender<Vec<MemberState<D>>>,
    /// Which members know how this one ended, or have ended themselves.
    heard: Mutex<Vec<bool>>,
}

/// What members report to one another by the watch.
pub trait Details: Message + Default + Clone + 'static {}

impl<D: Message + Default + Clone + 'static> Details for D {}

/// The state of a member, which the others follow.
#[derive(Clone, Debug, Default)]
pub struct MemberState<D> {
    /// Whether it has all connections that it needs.
    pub ready: bool,
    /// Why it has failed.
    pub failure: Option<String>,
    /// Whether it has left without a failure.
    pub left: bool,
    /// Whether it is lost. Each member finds that out itself.
    pub lost: bool,
    /// What else it reports.
    pub details: D,
}

/// How the watch over a member ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEnd {
    /// It has left without a failure.
    Left,
    /// It has failed, for this reason.
    Failed(String),
    /// The watch ended without a word, for this reason.
    Lost(String),
}

impl<D: Details> Bootstrap<D> {
    /// Takes part in a bootstrap. `keys` are those that this member gives to the others, if others join it.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn new(info: MemberInfo, keys: Option<Vec<Key>>) -> io::Result<Self> {
        let MemberInfo { noun, number, size, common, address, about } = info;
        let me = JoinRequest {
            version: VERSION,
            number: number as u32,
            size: size as u32,
            expected: number as u32,
            process: fresh_key()?.to_vec().into(),
            common,
            member: Some(Member { address, about }),
            wait: false,
        };
        Ok(Self {
            noun,
            is_joined: keys.is_some(),
            keys: keys.map(OnceLock::from).unwrap_or_default(),
            table: watch::Sender::new(MemberTable::new(noun, &me)),
            me,
            standing: watch::Sender::default(),
            others: watch::Sender::new(vec![MemberState::default(); size]),
            heard: Mutex::new((0..size).map(|other| other == number).collect()),
        })
    }

    /// Returns the number of this member.
    pub fn number(&self) -> usize {
        self.me.number as usize
    }

    /// Sets the keys that this member gives to the others, when it has learnt them by joining another one.
    pub fn set_keys(&self, keys: Vec<Key>) {
        // Nothing is lost if there are keys already: a member joins once.
        _ = self.keys.set(keys);
    }

    /// Returns the key that this member gives to another one, once it has keys.
    pub fn key(&self, member: usize) -> Option<Key> {
        self.keys.get()?.get(member).copied()
    }

    /// Returns the number of the calling member, if it has the key.
    ///
    /// # Errors
    /// The caller is no member.
    pub fn caller(&self, number: u32, key: &[u8]) -> Result<usize, Status> {
        let (member, noun) = (number as usize, self.noun);
        if self.keys.get().is_none() {
            return Err(Status::unavailable(format!("the {noun}s have not met yet")));
        }
        match self.key(member) {
            Some(ours) if ours[..] == *key && member != self.number() => Ok(member),
            _ => Err(Status::permission_denied(format!("the caller is no {noun} of this session"))),
        }
    }

    /// Admits a member. Returns the number of its call, or `None` if it fits and expects another member here.
    /// A member that fits learns why this one has failed, if it has.
    pub(super) fn admit(&self, request: JoinRequest) -> Result<Option<u64>, JoinError> {
        if !self.is_joined {
            let (noun, me) = (self.noun, self.number());
            return Err(JoinError::Refused(format!("this is {noun} {me}, and the {noun}s meet at {noun} 0")));
        }
        let failure = self.standing.borrow().failure.clone();
        let mut admitted = Ok(None);
        self.table.send_modify(|table| admitted = table.admit(request, failure));
        admitted
    }

    /// Waits until all members have joined this one.
    ///
    /// # Errors
    /// The time is over; the text says which members are missing, and who was refused.
    pub async fn all_joined(&self, until: Instant) -> Result<Vec<Member>, String> {
        let mut table = self.table.subscribe();
        let _ = tokio::time::timeout_at(until, table.wait_for(MemberTable::is_full)).await;
        let table = self.table.borrow();
        if table.is_full() { Ok(table.members()) } else { Err(table.describe()) }
    }

    /// Waits until all other members are ready or lost.
    ///
    /// # Errors
    /// The time is over, and this member is not ready.
    pub async fn all_ready(&self, until: Instant) -> Result<(), usize> {
        let waits_for = |others: &[MemberState<D>]| {
            let waits = |(member, other): &(usize, &MemberState<D>)| {
                !other.ready && !other.lost && *member != self.number()
            };
            others.iter().enumerate().find(waits).map(|(member, _)| member)
        };
        let mut others = self.others.subscribe();
        let ready = others.wait_for(|others| waits_for(others).is_none());
        let _ = tokio::time::timeout_at(until, ready).await;
        waits_for(&self.others.borrow()).map_or(Ok(()), Err)
    }

    /// Reads the state that another member reported.
    pub fn of<T>(&self, member: usize, look: impl FnOnce(&MemberState<D>) -> T) -> Option<T> {
        self.others.borrow().get(member).map(look)
    }

    /// Changes the state of another member.
    pub fn note(&self, member: usize, change: impl FnOnce(&mut MemberState<D>)) {
        self.others.send_modify(|others| _ = others.get_mut(member).map(change));
    }

    /// Reports to the others that this member has failed. Only the first reason counts.
    pub fn fail(&self, reason: &str) {
        self.standing.send_modify(|state| _ = state.failure.get_or_insert_with(|| shortened(reason)));
    }

    /// Reports to the others that this member has left, unless it has failed.
    pub fn leave(&self) {
        self.standing.send_modify(|state| state.left |= state.failure.is_none());
    }

    /// Notes that a member knows how this one ended, or has ended itself.
    pub(super) fn note_heard(&self, member: usize) {
        if let Some(heard) = lock(&self.heard).get_mut(member) {
            *heard = true;
        }
    }

    /// Returns whether this member has failed, and some other member does not know why yet.
    pub fn has_unread_failure(&self) -> bool {
        self.standing.borrow().failure.is_some() && lock(&self.heard).contains(&false)
    }

    /// Returns whether another member watches this one.
    pub fn is_watched(&self) -> bool {
        self.standing.receiver_count() > 0
    }
}

impl<D: Details> MemberState<D> {
    pub(super) fn encode(&self) -> proto::MemberState {
        let (ready, failure, left) = (self.ready, self.failure.clone(), self.left);
        proto::MemberState { ready, failure, left, details: self.details.encode_to_vec().into() }
    }

    pub(super) fn decode(message: proto::MemberState) -> Result<Self, prost::DecodeError> {
        let proto::MemberState { ready, failure, left, details } = message;
        let failure = failure.as_deref().map(shortened);
        Ok(Self { ready, failure, left, lost: false, details: D::decode(details)? })
    }
}

/// Makes a key that can't be guessed.
///
/// # Errors
/// The system gives no random numbers.
pub fn fresh_key() -> io::Result<Key> {
    let mut key = Key::default();
    // The system fills up to 256 bytes at once.
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    Ok(key)
}

/// Returns the text, or its beginning if it has more than 4096 bytes.
pub fn shortened(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
