//! The state machine's state, and the life of its streams.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use bytes::Bytes;
use foldhash::fast::RandomState;
use slab::Slab;

use super::landing::InOffer;
use super::stream::{InPart, Queued, Stream, StreamKey};
use super::wire::Message;
use crate::endpoint::SentHead;
use crate::grpc::fault::CallFault;
use crate::grpc::frame::head::{Decoder, Encoder};
use crate::grpc::frame::{Kind, Limits, RequestHead, ResetCode};
use crate::grpc::landing_budget::LandingBudget;

/// Landed bytes that were taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::grpc) struct LandedBytes {
    /// Of messages in one piece.
    pub(in crate::grpc) in_place: u64,
    /// Of others, which tonic copies.
    pub(in crate::grpc) copied: u64,
}

/// The end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::grpc) enum Role {
    Client,
    Server,
}

/// A map with numbers as keys. A peer chooses some of them, so the hash function has a secret.
pub(super) type NumberMap<K, V> = HashMap<K, V, RandomState>;

/// All calls of a connection. `K` keeps memory in place that the peer may read.
#[derive(Debug)]
pub(in crate::grpc) struct Core<K> {
    pub(super) role: Role,
    /// The limits of this end.
    pub(super) limits: Limits,
    /// The full window of a stream, from the first part that the application takes.
    pub(super) window: i64,
    /// The limits of the peer, once they have arrived.
    pub(super) peer: Option<Limits>,
    pub(super) settings_sent: bool,
    pub(super) streams: Slab<Stream<K>>,
    /// The streams whose calls are open, by number.
    pub(super) index: NumberMap<u32, StreamKey>,
    /// A client's next stream. A server's: the one after the last that was opened.
    pub(super) next_stream: u32,
    /// Calls that wait for another to end, the oldest first, and how many of them were dropped.
    pub(super) unopened: VecDeque<StreamKey>,
    pub(super) unopened_dropped: usize,
    /// Streams with something to send.
    pub(super) ready: VecDeque<StreamKey>,
    pub(super) bulk: VecDeque<StreamKey>,
    pub(super) encoder: Encoder,
    pub(super) decoder: Decoder,
    /// A head that did not fit into a message.
    pub(super) block: Option<Block>,
    /// A head of which frames are missing.
    pub(super) partial: Option<Partial>,
    pub(super) resets: VecDeque<(u32, ResetCode)>,
    pub(super) credits: VecDeque<(u32, u64)>,
    /// Offers of the peer whose memory is free.
    pub(super) taken: VecDeque<u64>,
    /// They wait for a message that follows at once, which takes them along.
    pub(in crate::grpc) keeps_taken: bool,
    /// What the peer may read, by offer.
    pub(super) offers: NumberMap<u64, Outstanding<K>>,
    /// Calls that have ended, and of which the peer has not given all offers back, with the number of these offers.
    pub(super) lingering: NumberMap<u32, u32>,
    pub(super) next_offer: u64,
    /// The peer's offers.
    pub(super) inbound: Slab<InOffer>,
    pub(super) expected_offer: u64,
    /// The number of the peer's offers that are not given back, by call.
    pub(super) owed: NumberMap<u32, u32>,
    /// How many of these calls have ended.
    pub(super) owed_ended: usize,
    /// The index of the offer that a fetch belongs to.
    pub(super) fetches: NumberMap<u64, usize>,
    pub(super) next_fetch: u64,
    /// Streams with offers to fetch.
    pub(super) fetchable: VecDeque<StreamKey>,
    pub(super) cancels: Vec<u64>,
    /// The memory that messages in one piece may have.
    pub(super) budget: Arc<LandingBudget>,
    /// Memory of the application that was sent, or is not sent any more. It is dropped without a lock, because its owner may make calls.
    pub(in crate::grpc) unneeded: Vec<Bytes>,
    /// The cost of data that arrived and was not taken, of all streams, and the most of it.
    pub(super) unread_data: i64,
    pub(super) most_unread_data: i64,
    /// Heads and trailers that were sent, or are not sent any more. They are dropped without a lock, too.
    pub(in crate::grpc) spent: Vec<SentHead>,
    /// What the heads and trailers count that arrived and that the application may still hold, of all streams, and the most of it.
    pub(super) heads: usize,
    pub(super) most_heads: usize,
    /// What the streams with a full window have beyond the first window, and the most of it.
    pub(super) full_windows: i64,
    pub(super) most_full_windows: i64,
    /// Bytes that were taken since the last question: in one piece, and in others.
    pub(in crate::grpc) landed_bytes: LandedBytes,
    /// Calls that the peer has opened, and that were not taken.
    pub(in crate::grpc) accepted: VecDeque<(StreamKey, RequestHead)>,
    pub(super) going: Going,
    /// Tasks to wake. They are woken without a lock.
    pub(in crate::grpc) wakers: Vec<Waker>,
    /// The connection has ended, for this reason.
    pub(in crate::grpc) ended: Option<CallFault>,
    /// Something was queued that the peer waits for.
    pub(in crate::grpc) urgent: bool,
    /// A message in parts was prepared further, and needs more turns before there is anything to send.
    pub(super) prepares: bool,
    /// The last `transmit` left work, though there was room to send. Then it is to be called again soon.
    pub(in crate::grpc) again: bool,
    /// Bytes that may still be copied in this `transmit`.
    pub(super) copy_budget: usize,
    pub(super) message: Message,
    pub(super) scratch: Vec<u8>,
}

/// A head under way to the peer.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) kind: Kind,
    pub(super) flags: u8,
    pub(super) stream: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) at: usize,
}

/// A head under way from the peer.
#[derive(Debug)]
pub(super) struct Partial {
    pub(super) kind: Kind,
    pub(super) stream: u32,
    pub(super) bytes: Vec<u8>,
}

/// What the peer may read.
#[derive(Debug)]
pub(super) struct Outstanding<K> {
    pub(super) stream: u32,
    /// Bytes of the message or part.
    pub(super) total: usize,
    /// Bytes that were copied for it.
    pub(super) copied: usize,
    #[expect(dead_code, reason = "keeps the memory in place")]
    pub(super) kept: Vec<K>,
}

/// Whether the ends still take new calls.
#[derive(Debug, Default)]
pub(super) struct Going {
    /// This end takes no new calls after this stream.
    pub(super) last_here: Option<u32>,
    /// The reason, until it is sent.
    pub(super) unsent: Option<Arc<str>>,
    /// The peer takes no new calls after this stream, for this reason.
    pub(super) last_there: Option<(u32, Arc<str>)>,
}

impl<K> Core<K> {
    /// Ended calls whose offers may be outstanding before a client opens more calls, in multiples of the calls that may be open. A server
    /// counts calls as ended whose end the client has not seen yet, so it allows one multiple more.
    pub(super) const LINGERING: usize = 2;
    /// The most that a stream may be sent ahead before the application reads. A hostile or a busy peer can't fill more memory than that for each
    /// stream.
    const FIRST_WINDOW: usize = 64 << 10;

    /// The reason why a connection takes no more calls, once a call has its last number.
    pub(super) const USED_UP: &'static str = "the numbers of its streams are used up";

    /// Makes the state of one end. Lengths are in bytes.
    pub(in crate::grpc) fn new(role: Role, streams: u32, head_bytes: usize, window: usize) -> Self {
        let limits = Limits {
            streams,
            head_bytes: u32::try_from(head_bytes).unwrap_or(u32::MAX),
            // At most 64 KiB.
            window: window.min(Self::FIRST_WINDOW) as u32,
            table_entries: 1024,
            table_bytes: 64 << 10,
        };
        Self {
            role,
            limits,
            window: i64::try_from(window).unwrap_or(i64::MAX >> 2),
            peer: None,
            settings_sent: false,
            streams: Slab::new(),
            index: NumberMap::default(),
            next_stream: 1,
            unopened: VecDeque::new(),
            unopened_dropped: 0,
            ready: VecDeque::new(),
            bulk: VecDeque::new(),
            encoder: Encoder::default(),
            decoder: Decoder::new(limits.table_entries, limits.table_bytes, limits.head_bytes),
            block: None,
            partial: None,
            resets: VecDeque::new(),
            credits: VecDeque::new(),
            taken: VecDeque::new(),
            keeps_taken: false,
            offers: NumberMap::default(),
            lingering: NumberMap::default(),
            next_offer: 0,
            inbound: Slab::new(),
            expected_offer: 0,
            owed: NumberMap::default(),
            owed_ended: 0,
            fetches: NumberMap::default(),
            next_fetch: 0,
            fetchable: VecDeque::new(),
            cancels: Vec::new(),
            budget: LandingBudget::new(u64::MAX),
            unneeded: Vec::new(),
            spent: Vec::new(),
            unread_data: 0,
            most_unread_data: i64::MAX,
            heads: 0,
            most_heads: usize::MAX,
            full_windows: 0,
            most_full_windows: i64::MAX,
            landed_bytes: LandedBytes::default(),
            accepted: VecDeque::new(),
            going: Going::default(),
            wakers: Vec::new(),
            ended: None,
            urgent: false,
            prepares: false,
            again: false,
            copy_budget: 0,
            message: Message::default(),
            scratch: Vec::new(),
        }
    }

    /// Streams that have full windows at least, however small the budget is.
    const FULL_WINDOWS: i64 = 8;

    /// Heads of the longest kind that there is room for at least, however small the budget is.
    const LONG_HEADS: usize = 64;

    /// Sets the memory that messages in one piece may have. As much may be in windows beyond the first ones, and as much again in data
    /// that was not taken. A quarter may be in heads.
    pub(in crate::grpc) fn set_landing_budget(&mut self, budget: Arc<LandingBudget>) {
        let limit = i64::try_from(budget.limit()).unwrap_or(i64::MAX);
        self.most_full_windows = limit.max(self.window.saturating_mul(Self::FULL_WINDOWS));
        self.most_unread_data = limit.saturating_add(self.most_full_windows);
        let longest = self.limits.head_bytes as usize;
        let heads = usize::try_from(budget.limit() / 4).unwrap_or(usize::MAX);
        self.most_heads = heads.max(longest.saturating_mul(Self::LONG_HEADS));
        self.budget = budget;
    }

    /// Notes that a head which counts `counted` bytes has arrived for the stream. Returns false, and notes nothing, if heads have too much
    /// memory already.
    pub(super) fn charge_head(&mut self, key: StreamKey, counted: usize) -> bool {
        if !self.has_room_for_head(counted) {
            return false;
        }
        self.heads += counted;
        self.streams[key.index()].receiving.head_bytes += counted;
        true
    }

    /// Returns whether a head that counts `counted` bytes stays within the bound of all heads.
    pub(super) fn has_room_for_head(&self, counted: usize) -> bool {
        self.heads.saturating_add(counted) <= self.most_heads
    }

    /// Gives the memory of a response's head and trailers back, if none of them waits to be taken. The head of a request counts until the
    /// handle of its stream is gone, because the handler has the head.
    pub(super) fn uncharge_heads(&mut self, key: StreamKey) {
        let receiving = &mut self.streams[key.index()].receiving;
        if self.role == Role::Client && receiving.head.is_none() && receiving.trailers.is_none() {
            self.heads -= std::mem::take(&mut receiving.head_bytes);
        }
    }

    /// Returns the number of calls that have not ended.
    pub(in crate::grpc) fn active(&self) -> usize {
        self.index.len() + self.unopened.len() - self.unopened_dropped
    }

    /// Returns the reason why no calls can be opened, if there is one: the peer's reason for going away, or the reason of this end.
    pub(in crate::grpc) fn going_away(&self) -> Option<Arc<str>> {
        if let Some((_, reason)) = &self.going.last_there {
            return Some(Arc::clone(reason));
        }
        if self.going.last_here.is_some() {
            return Some("this end closes it".into());
        }
        (self.next_stream == u32::MAX).then(|| Self::USED_UP.into())
    }

    /// Returns whether an end goes away, and nothing is left to do.
    pub(in crate::grpc) fn is_drained(&self) -> bool {
        let is_going = self.going.last_here.is_some() || self.going.last_there.is_some();
        let is_silent = self.resets.is_empty() && self.taken.is_empty() && self.going.unsent.is_none();
        is_going
            && is_silent
            && self.active() == 0
            && self.block.is_none()
            && self.offers.is_empty()
            && self.inbound.is_empty()
    }

    /// Takes a call that the peer has opened.
    pub(in crate::grpc) fn next_accepted(&mut self) -> Option<(StreamKey, RequestHead)> {
        self.accepted.pop_front()
    }

    /// Takes no new calls from now on.
    pub(in crate::grpc) fn go_away(&mut self, reason: &str) {
        if self.going.last_here.is_none() {
            self.going.last_here = Some(if self.role == Role::Server { self.next_stream - 1 } else { 0 });
            self.going.unsent = Some(reason.into());
        }
    }

    /// Ends all calls, because the connection has ended. What has arrived can still be taken.
    pub(in crate::grpc) fn end(&mut self, fault: &CallFault) {
        if self.ended.is_some() {
            return;
        }
        self.ended = Some(fault.clone());
        let keys: Vec<_> = self.streams.iter().map(|(index, _)| StreamKey(index as u32)).collect();
        for key in keys {
            let stream = &mut self.streams[key.index()];
            let whole =
                stream.closed && !stream.receiving.parts.iter().any(|part| matches!(part, InPart::Offer(_)));
            if !whole {
                self.fail(key, fault.clone());
            }
        }
        // Nothing is sent and nothing lands any more.
        self.offers.clear();
        self.lingering.clear();
        self.fetches.clear();
        self.inbound.clear();
        self.owed.clear();
        self.owed_ended = 0;
        (self.block, self.partial) = (None, None);
        self.resets.clear();
        self.credits.clear();
        self.taken.clear();
        self.cancels.clear();
        for queue in [&mut self.ready, &mut self.bulk, &mut self.unopened, &mut self.fetchable] {
            queue.clear();
        }
        (self.unopened_dropped, self.again) = (0, false);
        for (_, stream) in &mut self.streams {
            (stream.sending.queued, stream.receiving.queued) = (Queued::No, false);
        }
        self.streams.retain(|_, stream| stream.held);
        self.accepted.retain(|(key, _)| self.streams.contains(key.index()));
    }

    /// Ends a call with a fault. Parts that arrived can still be taken; offers can't.
    pub(super) fn fail(&mut self, key: StreamKey, fault: CallFault) {
        self.close(key);
        let Some(stream) = self.streams.get_mut(key.index()) else { return };
        stream.fault.get_or_insert(fault);
        stream.take_wakers(&mut self.wakers);
        let mut arrived = std::mem::take(&mut stream.receiving.parts);
        let mut is_whole = true;
        while let Some(part) = arrived.pop() {
            match part {
                InPart::Offer(offer) => {
                    is_whole = false;
                    self.discard_offer(offer);
                }
                part if is_whole => self.streams[key.index()].receiving.parts.push(part),
                part => self.unread_data -= part.data_cost(),
            }
        }
        if !is_whole {
            // The reader gets the fault where the body breaks off.
            let receiving = &mut self.streams[key.index()].receiving;
            (receiving.ended, receiving.trailers) = (false, None);
        }
        self.remove_if_over(key);
    }

    /// Closes both halves of a call. Parts and offers that have arrived stay.
    pub(super) fn close(&mut self, key: StreamKey) {
        let stream = &mut self.streams[key.index()];
        stream.stop_sending(&mut self.unneeded, &mut self.spent);
        if stream.closed {
            return;
        }
        stream.closed = true;
        if stream.id != 0 {
            self.index.remove(&stream.id);
            self.owed_ended += usize::from(self.owed.contains_key(&stream.id));
            if stream.sending.offers > 0 {
                self.lingering.insert(stream.id, stream.sending.offers);
            }
        } else if stream.sending.queued == Queued::Unopened {
            self.unopened_dropped += 1;
        }
    }

    /// Frees the place of a call that has ended and whose handle is gone. A place in a queue is given up only when the queue
    /// comes to it.
    pub(super) fn remove_if_over(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get(key.index()) else { return };
        let is_queued = stream.sending.queued != Queued::No || stream.receiving.queued;
        if stream.closed && !stream.held && !is_queued {
            let stream = self.streams.remove(key.index());
            self.heads -= stream.receiving.head_bytes;
            self.full_windows -= (stream.receiving.target - i64::from(self.limits.window)).max(0);
        }
    }

    /// Queues a stream that has something to send.
    pub(super) fn schedule(&mut self, key: StreamKey) {
        let stream = &mut self.streams[key.index()];
        if stream.sending.queued == Queued::No && stream.id != 0 && stream.can_send() {
            stream.sending.queued = Queued::Ready;
            self.ready.push_back(key);
        }
    }
}
