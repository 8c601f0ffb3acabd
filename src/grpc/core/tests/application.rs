//! Applications at both sides. A task is polled only when it was woken, so a wake-up that is missing becomes
//! a hang.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Poll, Wake, Waker};

use bytes::Bytes;
use fastrand::Rng;
use http::{HeaderMap, HeaderValue};

use super::network::CorePair;
use crate::grpc::core::{Part, StreamKey};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{RequestHeaders, ResetCode};

/// A task's wake-up.
#[derive(Debug)]
pub(super) struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Flag {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(AtomicBool::new(true)))
    }

    /// Returns whether the task is to be polled.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// A part of a body to send.
#[derive(Clone, Debug)]
pub(super) enum Plan {
    Data(usize),
    Message(Vec<usize>),
}

/// What is to happen in a call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) number: usize,
    /// The bodies of both sides.
    pub(super) bodies: [Vec<Plan>; 2],
    /// The server reads the whole request before it ends the call.
    pub(super) reads_all: bool,
    /// Messages are delivered in one segment, by end.
    pub(super) landed: [bool; 2],
    /// How often an end reads, in percent.
    pub(super) reads: [u32; 2],
    /// The end that resets the call, after so many of its steps.
    pub(super) reset: Option<(usize, u32)>,
}

fn length(plan: &[Plan]) -> u64 {
    let of = |part: &Plan| match part {
        Plan::Data(length) => *length,
        Plan::Message(parts) => parts.iter().sum(),
    };
    plan.iter().map(|part| of(part) as u64).sum()
}

/// Irregular bytes, whose number is a prime.
static NOISE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = Rng::with_seed(1);
    (0..65_521).map(|_| random.u8(..)).collect()
});

/// Returns bytes of the body that an end sends in a call.
fn content(call: usize, end: usize, start: u64, length: usize) -> Bytes {
    let mut at = (call * 7919 + end * 104_729 + start as usize) % NOISE.len();
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let next = (length - bytes.len()).min(NOISE.len() - at);
        bytes.extend_from_slice(&NOISE[at..at + next]);
        at = 0;
    }
    bytes.into()
}

/// The end of a call's reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All of the body was read, with trailers or without.
    Read {
        trailers: bool,
    },
    Failed(CallFault),
}

/// One end of a call.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) call: Call,
    end: usize,
    key: Option<StreamKey>,
    plan: VecDeque<Plan>,
    sent: u64,
    pub(super) read: u64,
    has_headers: bool,
    has_trailers: bool,
    pub(super) has_sent_all: bool,
    pub(super) outcome: Option<Outcome>,
    steps: u32,
    sender: Arc<Flag>,
    reader: Arc<Flag>,
}

impl Side {
    pub(super) fn open(pair: &mut CorePair, call: &Call) -> Self {
        let path = format!("/sim/{}", call.number % 7).parse().unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("call", HeaderValue::from(call.number));
        headers.insert("te", HeaderValue::from_static("trailers"));
        let head = RequestHeaders { path, authority: Some("sim:1".parse().unwrap()), headers };
        // After a GOAWAY no call is opened.
        let key = pair.ends[0].core.open(head).ok();
        pair.transmit(0);
        Self::new(0, call, key)
    }

    /// Takes a call at the server.
    pub(super) fn accept(pair: &mut CorePair, calls: &[Call]) -> Option<Self> {
        let (key, head) = pair.ends[1].core.next_accepted()?;
        let number: usize = head.headers["call"].to_str().unwrap().parse().unwrap();
        assert_eq!((head.path.as_str(), head.headers.len()), (&*format!("/sim/{}", number % 7), 2));
        pair.ends[1].core.send_headers(key, HeaderMap::new());
        pair.transmit(1);
        Some(Self::new(1, &calls[number], Some(key)))
    }

    fn new(end: usize, call: &Call, key: Option<StreamKey>) -> Self {
        let plan = call.bodies[end].clone().into();
        Self {
            call: call.clone(),
            end,
            key,
            plan,
            sent: 0,
            read: 0,
            has_headers: end == 1,
            has_trailers: false,
            has_sent_all: false,
            outcome: None,
            steps: 0,
            sender: Flag::new(),
            reader: Flag::new(),
        }
    }

    /// Returns whether the application is done with the call.
    pub(super) fn is_over(&self) -> bool {
        self.key.is_none()
    }

    /// Runs the tasks that were woken. Returns whether there was one. Without `random` no task hesitates.
    pub(super) fn step(&mut self, pair: &mut CorePair, random: Option<&mut Rng>) -> bool {
        let Some(key) = self.key else { return false };
        self.steps += 1;
        if self.steps == 1 && self.call.landed[self.end] {
            pair.ends[self.end].core.deliver_landed(key, 1 << 24);
        }
        if self.call.reset.is_some_and(|(end, after)| end == self.end && self.steps > after) {
            if self.steps.is_multiple_of(2) {
                pair.ends[self.end].core.reset(key, ResetCode::Cancel);
            }
            self.outcome = Some(Outcome::Failed(CallFault::ResetHere(ResetCode::Cancel)));
            self.release(pair, key);
            return true;
        }
        let reads = random.is_none_or(|random| random.u32(..100) < self.call.reads[self.end]);
        let moved = self.send(pair, key) | (reads && self.receive(pair, key));
        let core = &mut pair.ends[self.end].core;
        if core.take_urgent() || moved {
            pair.transmit(self.end);
        }
        let has_ended = self.outcome.is_some() || (self.end == 1 && !self.call.reads_all);
        if has_ended && (self.has_sent_all || matches!(self.outcome, Some(Outcome::Failed(_)))) {
            self.release(pair, key);
        }
        moved
    }

    fn release(&mut self, pair: &mut CorePair, key: StreamKey) {
        pair.ends[self.end].core.release(key);
        pair.ends[self.end].wake();
        pair.transmit(self.end);
        self.key = None;
    }

    fn send(&mut self, pair: &mut CorePair, key: StreamKey) -> bool {
        let waits = self.end == 1 && self.call.reads_all && self.plan.is_empty() && self.outcome.is_none();
        if self.has_sent_all || waits || !self.sender.take() {
            return false;
        }
        let core = &mut pair.ends[self.end].core;
        match core.poll_send_ready(key, &Waker::from(self.sender.clone())) {
            Poll::Pending => return true,
            Poll::Ready(Err(_)) => {
                self.has_sent_all = true;
                return true;
            }
            Poll::Ready(Ok(())) => self.sender.wake_by_ref(),
        }
        let mut next = |length: usize| {
            self.sent += length as u64;
            content(self.call.number, self.end, self.sent - length as u64, length)
        };
        match self.plan.pop_front() {
            Some(Plan::Data(length)) => {
                let data = next(length);
                // The last part of a request ends it.
                let is_last = self.end == 0 && self.plan.is_empty();
                core.send_data(key, data, is_last);
                self.has_sent_all = is_last;
            }
            Some(Plan::Message(parts)) => {
                let parts: Vec<_> = parts.into_iter().map(next).collect();
                core.send_message(key, parts, 5, false);
            }
            None => {
                if self.end == 0 {
                    core.send_data(key, Bytes::new(), true);
                } else {
                    core.send_trailers(key, HeaderMap::new());
                }
                self.has_sent_all = true;
            }
        }
        true
    }

    fn receive(&mut self, pair: &mut CorePair, key: StreamKey) -> bool {
        if self.outcome.is_some() || !self.reader.take() {
            return false;
        }
        let waker = Waker::from(self.reader.clone());
        let core = &mut pair.ends[self.end].core;
        if !self.has_headers {
            match core.poll_headers(key, Some(&waker)) {
                Poll::Pending => {}
                Poll::Ready(Ok(_)) => {
                    self.has_headers = true;
                    waker.wake();
                }
                Poll::Ready(Err(fault)) => self.end_with(Outcome::Failed(fault)),
            }
            return true;
        }
        let part = match core.poll_part(key, Some(&waker)) {
            Poll::Pending => return true,
            Poll::Ready(part) => part,
        };
        match part {
            Some(Ok(Part::Data(data) | Part::Message(data))) => {
                assert!(!data.is_empty() && !self.has_trailers);
                let expected = content(self.call.number, 1 - self.end, self.read, data.len());
                assert!(data == expected, "call {}: bytes from {} on", self.call.number, self.read);
                self.read += data.len() as u64;
                waker.wake();
            }
            Some(Ok(Part::Trailers(_))) => {
                self.has_trailers = true;
                waker.wake();
            }
            Some(Err(fault)) => self.end_with(Outcome::Failed(fault)),
            None => {
                let (read, all) = (self.read, length(&self.call.bodies[1 - self.end]));
                assert_eq!(read, all, "the bytes of a body that ended: {self:?}");
                self.end_with(Outcome::Read { trailers: self.has_trailers });
            }
        }
        true
    }

    fn end_with(&mut self, outcome: Outcome) {
        self.outcome = Some(outcome);
        // The server sends its trailers then.
        self.sender.wake_by_ref();
    }
}
