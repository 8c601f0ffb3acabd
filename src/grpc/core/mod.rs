//! The calls of one connection as a state machine without IO: no clock, no verbs, no executor.
//!
//! The owner of a [`Core`] reports what happened ([`receive`](Core::receive), [`landed`](Core::landed), …),
//! gives commands of streams (`open`, `send_data`, …), takes what arrived (`poll_headers`, `poll_part`), and
//! lets it [`transmit`](Core::transmit) over a [`Wire`](crate::endpoint::Wire).
//!
//! A call has two halves, one for each direction:
//!
//! | half | sent so far | left by |
//! |---|---|---|
//! | idle | nothing | HEADERS (next: open) |
//! | open | HEADERS, and DATA or OFFER | END (next: closed), TRAILERS (both halves closed) |
//! | closed | | |
//!
//! The server's END or TRAILERS, and a RESET of either side, close the call. Frames of a closed call that
//! were under way are read and dropped; what they offer is given back.
//!
//! **Flow control.** Each stream has a window of *cost*: a part of the body costs its length and a fixed
//! number of bytes, so that many small parts can't fill the memory of the receiver. DATA stays within the
//! window. An OFFER needs some window left and may overdraw it, because its bytes stay at the sender until
//! the receiver reads them.
//!
//! **Turns.** Streams take turns, one message's worth at a time. Streams with much to send wait in a queue of
//! their own, which gets one turn after each message for the others. So a small call never waits behind a
//! large one.

mod commands;
mod control;
mod headers;
mod ledger;
mod output;
mod receive;
mod received_offers;
mod sent_offers;
mod stream;
mod streams;
#[cfg(test)]
mod tests;
mod transmit;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use self::control::Control;
use self::headers::HeaderBlocks;
use self::ledger::Ledger;
use self::output::Output;
use self::received_offers::ReceivedOffers;
use self::stream::InPart;
use self::streams::Streams;
pub(super) use crate::endpoint::Role;
use crate::endpoint::{Deferred, HeldShare};
use crate::grpc::calls::CallConfig;
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{Limits, OfferSegment, RequestHeaders};

pub(crate) use self::commands::OpenError;
pub(super) use self::commands::keep;
pub(super) use self::ledger::cost_of;
pub(crate) use self::stream::Part;
pub(super) use self::stream::{LandedBytes, OVERHEAD, OutPart, Parts, StreamKey};

/// The reason why a connection accepts no more calls after the last number of a stream was used.
const USED_UP: &str = "the numbers of its streams are used up";

/// All calls of a connection. `K` keeps memory in place that the peer may read.
///
/// Each field keeps its own invariants. The methods of this type carry out what concerns several of them.
#[derive(Debug)]
pub(super) struct Core<K> {
    role: Role,
    /// The limits of this side.
    limits: Limits,
    /// The limits of the peer, once they have arrived.
    peer: Option<Limits>,
    streams: Streams,
    /// Calls that the peer has opened, and that were not taken.
    accepted: VecDeque<(StreamKey, RequestHeaders)>,
    /// Since when the calls waited whose headers were sent, as far as they are timed.
    sent: Vec<Instant>,
    headers: HeaderBlocks,
    control: Control,
    received_offers: ReceivedOffers,
    ledger: Ledger,
    output: Output<K>,
    /// The last `transmit` left work, though there was room to send.
    again: bool,
    after: Deferred,
    /// The connection has ended, for this reason.
    ended: Option<CallFault>,
}

impl<K> Core<K> {
    /// Makes the state of one side, which holds at most `limit` bytes of each kind. `has_windows`: the peer knows
    /// windows of the connection. `share`: the connection's, of what the process may hold.
    pub(super) fn new(
        role: Role,
        config: &CallConfig,
        limit: u64,
        has_windows: bool,
        share: HeldShare,
    ) -> Self {
        let ledger = Ledger::new(limit, config.stream_window, has_windows, share);
        let limits = Limits {
            streams: config.max_concurrent_streams,
            header_bytes: u32::try_from(config.max_header_list_size).unwrap_or(u32::MAX),
            // At most 64 KiB.
            window: ledger.first_window as u32,
            table_entries: 1024,
            table_bytes: 64 << 10,
            windows: ledger.windows(),
        };
        Self {
            role,
            limits,
            peer: None,
            streams: Streams::default(),
            accepted: VecDeque::new(),
            sent: Vec::new(),
            headers: HeaderBlocks::new(&limits),
            control: Control::default(),
            received_offers: ReceivedOffers::default(),
            ledger,
            output: Output::new(),
            again: false,
            after: Deferred::default(),
            ended: None,
        }
    }

    /// Returns what is to be done without a lock, because it may run code of the application: tasks to wake,
    /// and memory and headers to drop that were sent, or are not sent any more.
    pub(super) fn after(&mut self) -> &mut Deferred {
        self.wake_senders();
        &mut self.after
    }

    /// Wakes the senders that wait, if they can go on.
    fn wake_senders(&mut self) {
        if self.ledger.wakes_senders() {
            self.after
                .wakers
                .extend(self.streams.iter_mut().filter_map(|stream| stream.sending.waker.take()));
        }
    }

    /// Returns whether something that the peer waits for was queued since the last call.
    pub(super) fn take_urgent(&mut self) -> bool {
        self.control.take_urgent() || self.ledger.is_due()
    }

    /// Returns whether the peer is to get credit for the connection.
    pub(super) fn owes_credit(&self) -> bool {
        self.ledger.is_due()
    }

    /// Returns whether this side has so much to send that senders wait.
    pub(super) fn has_much_to_send(&self) -> bool {
        self.ledger.has_much_to_send()
    }

    /// Lets TAKEN wait for a message that follows at once, which takes it along, or not.
    pub(super) fn keep_taken(&mut self, keeps: bool) {
        self.control.keep_taken(keeps);
    }

    /// Returns whether the last `transmit` left work, though there was room to send. Then it is to be called
    /// again soon.
    pub(super) fn transmits_again(&self) -> bool {
        self.again
    }

    /// Returns whether the last `transmit` left work, and forgets it.
    pub(super) fn take_again(&mut self) -> bool {
        std::mem::take(&mut self.again)
    }

    /// Returns whether calls can be opened.
    pub(super) fn takes_calls(&self) -> bool {
        let control = &self.control;
        let goes_away = control.has_gone_away() || control.peer_went_away().is_some();
        self.ended.is_none() && !goes_away && !self.streams.is_used_up()
    }

    /// Returns the number of calls that have not ended.
    pub(super) fn active(&self) -> usize {
        self.streams.active()
    }

    /// Returns the reason why no calls can be opened, if there is one: the peer's reason for going away, or
    /// the reason of this side.
    pub(super) fn going_away(&self) -> Option<Arc<str>> {
        if let Some(reason) = self.control.peer_went_away() {
            return Some(Arc::clone(reason));
        }
        if self.control.has_gone_away() {
            return Some("this end closes it".into());
        }
        self.streams.is_used_up().then(|| USED_UP.into())
    }

    /// Returns whether a side goes away, and nothing is left to do.
    pub(super) fn is_drained(&self) -> bool {
        self.control.is_drained()
            && self.active() == 0
            && !self.headers.has_unsent()
            && self.output.offers.is_empty()
            && self.received_offers.is_empty()
    }

    /// Takes a call that the peer has opened.
    pub(super) fn next_accepted(&mut self) -> Option<(StreamKey, RequestHeaders)> {
        self.accepted.pop_front()
    }

    /// Notes that the calls after the first `known` of those that were not taken have come `now`.
    pub(super) fn note_accepted(&mut self, known: usize, now: Instant) {
        for (key, _) in self.accepted.iter().skip(known) {
            self.streams[*key].waits_since = Some(now);
        }
    }

    /// Notes that a call of this client waits from `now` on.
    pub(super) fn note_waiting(&mut self, key: StreamKey, now: Instant) {
        self.streams[key].waits_since = Some(now);
    }

    /// Takes the time since when a call has waited.
    pub(super) fn take_waits_since(&mut self, key: StreamKey) -> Option<Instant> {
        self.streams[key].waits_since.take()
    }

    /// Takes the times since when the calls had waited that were sent.
    pub(super) fn take_sent(&mut self) -> std::vec::Drain<'_, Instant> {
        self.sent.drain(..)
    }

    /// Returns the number of calls that the peer has opened and that were not taken.
    pub(super) fn accepted(&self) -> usize {
        self.accepted.len()
    }

    /// Returns whether the peer has opened calls that were not taken.
    pub(super) fn has_accepted(&self) -> bool {
        !self.accepted.is_empty()
    }

    /// Takes no new calls from now on.
    pub(super) fn go_away(&mut self, reason: &str) {
        let last = if self.role == Role::Server { self.streams.last_number() } else { 0 };
        self.control.go_away(last, reason);
    }

    /// Ends all calls, because the connection has ended. What has arrived can still be taken.
    pub(super) fn end(&mut self, fault: &CallFault) {
        if self.ended.is_some() {
            return;
        }
        self.ended = Some(fault.clone());
        let keys: Vec<_> = self.streams.iter().map(|(key, _)| key).collect();
        for key in keys {
            let stream = &self.streams[key];
            let whole =
                stream.closed && !stream.receiving.parts.iter().any(|part| matches!(part, InPart::Offer(_)));
            if !whole {
                self.fail(key, fault.clone());
            }
        }
        // Nothing is sent and nothing lands any more.
        self.output.offers.end();
        self.received_offers.end(&mut self.ledger);
        self.ledger.end(&mut self.after.wakers);
        self.headers.end();
        self.control.end();
        self.streams.end();
        self.again = false;
        self.accepted.retain(|(key, _)| self.streams.get(*key).is_some());
    }

    /// Ends a call with a fault. Parts that arrived can still be taken; offers can't.
    fn fail(&mut self, key: StreamKey, fault: CallFault) {
        self.close(key);
        let stream = &mut self.streams[key];
        stream.fault.get_or_insert(fault);
        stream.take_wakers(&mut self.after.wakers);
        let mut arrived = std::mem::take(&mut stream.receiving.parts);
        let mut is_whole = true;
        while let Some(part) = arrived.pop() {
            is_whole &= !matches!(part, InPart::Offer(_));
            if is_whole {
                self.streams[key].receiving.parts.push(part);
            } else {
                self.discard_part(part);
            }
        }
        if !is_whole {
            // The reader gets the fault where the body breaks off.
            let receiving = &mut self.streams[key].receiving;
            (receiving.ended, receiving.trailers) = (false, None);
        }
        self.remove_if_over(key);
    }

    /// Closes both halves of a call. Parts and offers that have arrived stay.
    fn close(&mut self, key: StreamKey) {
        let stream = &mut self.streams[key];
        let before = self.ledger.sent_by(stream);
        if stream.sending.is_preparing {
            let segments = self.output.offers.take_preparing(stream).segments;
            self.after.unneeded.extend(segments.into_iter().filter_map(OfferSegment::into_inline));
        }
        stream.stop_sending(&mut self.after);
        let (number, offers, after) = (stream.id, stream.sending.offers, self.ledger.sent_by(stream));
        if self.streams.close(key) && number != 0 {
            self.ledger.resend(before, after);
            self.output.offers.call_ended(number, offers, after);
        }
    }

    /// Frees what a call has that has ended and whose handle is gone: its slot when no queue has it.
    fn remove_if_over(&mut self, key: StreamKey) {
        if let Some(stream) = self.streams.over(key) {
            self.ledger.release_headers(&mut stream.receiving);
            self.streams.remove_unless_queued(key);
        }
    }
}
