//! The process under test: one completion queue, an honest neighbour whose traffic must go on, and a bad one.

use std::collections::VecDeque;
use std::sync::Arc;

use tonic_rdma_verbs::{
    CompletionOpcode, CompletionQueue, CompletionStatus, Context, HostMemory, ProtectionDomain,
    QueuePairState, RemoteSegment, Rkey, VerbsError, VerbsErrorKind, WorkCompletion, soft,
};

use crate::end::{
    GUARD, LARGE, LocalEnd, MESSAGES, OPEN, RECEIVES, ROOM, SINK, SOURCE, at, content, pattern, segment,
    sleep_for,
};
use crate::process::Process;

/// The identifier of sends and writes to the honest neighbour; receives have lower ones.
const SENT: u64 = 1000;
/// The identifier of a READ of a memory that the bad neighbour named.
const READ_BY_NAME: u64 = 1001;
/// Seconds after which a wake-up is lost.
const WAKE_UP: i64 = 60;
/// Number of memories that a bad neighbour names.
pub const MEMORIES: usize = 2000;
/// Number of requests outstanding to a bad neighbour.
const OUTSTANDING: usize = 6;

/// The process under test.
#[derive(Debug)]
pub struct Victim {
    _context: Arc<dyn Context>,
    pub domain: Arc<dyn ProtectionDomain>,
    pub queue: Arc<dyn CompletionQueue>,
    honest: Honest,
}

#[derive(Debug)]
struct Honest {
    _process: Process,
    end: LocalEnd,
    target: RemoteSegment,
    calls: u64,
    completed: VecDeque<WorkCompletion>,
}

impl Honest {
    /// Connects to an honest neighbour. Returns `None` if one of the two could not connect in time.
    fn connect(
        domain: &dyn ProtectionDomain,
        queue: &Arc<dyn CompletionQueue>,
        mut process: Process,
        role: &str,
    ) -> Option<Self> {
        process.tell(role);
        let end = LocalEnd::new(domain, queue, 0);
        let target = end.connect(&process.hear()?).ok()?[0];
        process.tell(&end.describe());
        if process.hear()? != "ready" {
            return None;
        }
        Some(Self { _process: process, end, target, calls: 0, completed: VecDeque::new() })
    }
}

/// A connection to a bad neighbour.
#[derive(Debug)]
pub struct Bad {
    pub end: LocalEnd,
    pub targets: Vec<RemoteSegment>,
    outstanding: usize,
    posted: usize,
    failed: bool,
    received: usize,
    read_by_name: usize,
    /// Memories that the neighbour named in its messages.
    named: Vec<RemoteSegment>,
}

impl Victim {
    /// Starts with an honest neighbour of this user.
    pub fn new() -> Self {
        Self::beside("echo", Process::start_honest)
    }

    /// Starts with an honest neighbour of the role `role`, in a process that `start` starts.
    pub fn beside(role: &str, start: fn() -> Process) -> Self {
        let context = soft::open().unwrap();
        let domain = context.alloc_protection_domain().unwrap();
        let queue = context.create_completion_queue(1024).unwrap();
        // On a busy machine the answer of a device may come too late.
        let honest = (0..10).find_map(|_| Honest::connect(&*domain, &queue, start(), role)).unwrap();
        Self { _context: context, domain, queue, honest }
    }

    /// Makes a connection to `process`, which is able to connect. On a busy machine the answer of its device
    /// may come too late; then another process takes its place.
    pub fn connect(&self, process: &mut Process, role: &str) -> Bad {
        const TRIES: usize = 10;
        for _ in 1..TRIES {
            match self.invite(process, role) {
                Ok(bad) => return bad,
                Err(_) => *process = Process::start(),
            }
        }
        self.invite(process, role).unwrap()
    }

    /// Makes a connection to `process`, which does harm in the way of `role`.
    pub fn invite(&self, process: &mut Process, role: &str) -> Result<Bad, VerbsError> {
        let ended = |reason: &'static str| VerbsError::new(VerbsErrorKind::Unreachable, reason);
        process.tell(role);
        let line = process.hear().ok_or_else(|| ended("the process ended"))?;
        if line == "ended" {
            return Err(ended("the role ended"));
        }
        let end = LocalEnd::new(&*self.domain, &self.queue, 0);
        let targets = end.connect(&line)?;
        process.tell(&end.describe());
        Ok(Bad {
            end,
            targets,
            outstanding: 0,
            posted: 0,
            failed: false,
            received: 0,
            read_by_name: 0,
            named: Vec::new(),
        })
    }

    /// Makes one call to the honest neighbour, and checks its answer. Every eighth call also writes and reads
    /// a large content. The thread sleeps until each completion, and serves the bad neighbour beside.
    pub fn call(&mut self, mut bad: Option<&mut Bad>) {
        let calls = self.honest.calls;
        self.honest.calls += 1;
        let message = pattern(calls, 64 + (calls * 37 % 3000) as usize);
        if let Some(bad) = bad.as_deref_mut() {
            bad.serve();
        }
        let place = MESSAGES + calls as usize % 8 * ROOM;
        let Honest { end, target, .. } = &self.honest;
        if message.len() <= 256 {
            end.send_inline(SENT, &message).unwrap();
        } else {
            end.memory.copy_in(place, &message).unwrap();
            end.send(SENT, place, message.len()).unwrap();
        }
        let large = calls.is_multiple_of(8).then(|| pattern(!calls, LARGE));
        if let Some(large) = &large {
            end.memory.copy_in(SOURCE, large).unwrap();
            end.write(SENT, segment(&end.region, SOURCE, LARGE), at(*target, OPEN)).unwrap();
            end.read(SENT, segment(&end.region, SINK, LARGE), at(*target, OPEN)).unwrap();
        }
        let (mut sent, mut answered) = (0, false);
        while sent < 1 + 2 * usize::from(large.is_some()) || !answered {
            let completion = self.next(bad.as_deref_mut());
            assert_eq!(completion.status, CompletionStatus::Success, "an honest request failed");
            if completion.opcode == CompletionOpcode::Receive {
                let length = completion.byte_len as usize;
                let end = &self.honest.end;
                let answer = content(&end.memory, completion.wr_id as usize * ROOM, length);
                assert!(answer == message, "the answer to honest call {calls} has wrong bytes");
                end.post_receive(completion.wr_id);
                answered = true;
            } else {
                sent += 1;
            }
        }
        if let Some(large) = large {
            let end = &self.honest.end;
            assert!(content(&end.memory, SINK, LARGE) == large, "honest call {calls} read wrong bytes");
        }
    }

    /// Makes `count` calls. Returns early when the connection of the bad neighbour has ended.
    pub fn calls_beside(&mut self, count: usize, bad: &mut Bad) {
        for _ in 0..count {
            self.call(Some(bad));
            if bad.has_ended() {
                return;
            }
        }
    }

    /// Returns whether no peer changed memory that was not offered to it.
    pub fn guards_are_whole(&self, bad: &Bad) -> bool {
        self.honest.end.guard_is_whole() && bad.end.guard_is_whole()
    }

    /// Waits for the next completion of the honest connection.
    fn next(&mut self, mut bad: Option<&mut Bad>) -> WorkCompletion {
        loop {
            if let Some(completion) = self.honest.completed.pop_front() {
                return completion;
            }
            let mut completions = [WorkCompletion::EMPTY; 16];
            let count = sleep_for(&*self.queue, &mut completions, WAKE_UP);
            if count == 0 {
                let found = self.queue.poll(&mut completions);
                panic!(
                    "honest call {}: no wake-up came in {WAKE_UP} s; a poll then found {:?}",
                    self.honest.calls,
                    &completions[..found]
                );
            }
            self.sort(&completions[..count], bad.as_deref_mut());
        }
    }

    /// Polls once.
    pub fn poll(&mut self, bad: Option<&mut Bad>) {
        let mut completions = [WorkCompletion::EMPTY; 16];
        let count = self.queue.poll(&mut completions);
        self.sort(&completions[..count], bad);
    }

    fn sort(&mut self, completions: &[WorkCompletion], mut bad: Option<&mut Bad>) {
        for completion in completions {
            if completion.queue_pair == self.honest.end.pair.number() {
                self.honest.completed.push_back(*completion);
            } else if let Some(bad) = bad.as_deref_mut()
                && completion.queue_pair == bad.end.pair.number()
            {
                bad.completed(completion);
            }
        }
    }
}

impl Bad {
    /// Posts requests of each kind to the neighbour, as far as there is room.
    pub fn serve(&mut self) {
        let end = &self.end;
        while let Some(named) = self.named.pop() {
            if end.read(READ_BY_NAME, segment(&end.region, SINK, 64), named).is_err() {
                self.named.push(named);
                break;
            }
        }
        while self.outstanding < OUTSTANDING && !self.has_ended() {
            let target = at(self.targets[0], OPEN);
            let end = &self.end;
            let posted = match self.posted % 4 {
                0 => end.send_inline(SENT, &[1; 64]),
                1 => end.write(SENT, segment(&end.region, SOURCE, LARGE), target),
                2 => end.send(SENT, MESSAGES, ROOM),
                _ => end.read(SENT, segment(&end.region, SINK, LARGE), target),
            };
            self.posted += 1;
            if posted.is_err() {
                break;
            }
            self.outstanding += 1;
        }
    }

    /// Returns the number of messages that have come.
    pub fn received(&self) -> usize {
        self.received
    }

    /// Returns the number of memories that the neighbour named, and that were read.
    pub fn read_by_name(&self) -> usize {
        self.read_by_name
    }

    fn completed(&mut self, completion: &WorkCompletion) {
        if completion.status != CompletionStatus::Success {
            self.failed = true;
        } else if completion.wr_id == READ_BY_NAME {
            self.read_by_name += 1;
        } else if completion.wr_id == SENT {
            self.outstanding = self.outstanding.saturating_sub(1);
        } else if completion.wr_id < RECEIVES as u64 {
            self.received += 1;
            self.remember_name(completion);
            self.end.post_receive(completion.wr_id);
        }
    }

    /// Remembers the memory that a message of the role `segments` names.
    fn remember_name(&mut self, completion: &WorkCompletion) {
        let message = content(&self.end.memory, completion.wr_id as usize * ROOM, 64);
        let text = String::from_utf8_lossy(&message);
        let mut words = text.split(' ');
        if let (Some(Ok(address)), Some(Ok(rkey))) =
            (words.next().map(str::parse), words.next().map(str::parse))
            && self.named.len() < MEMORIES
        {
            self.named.push(RemoteSegment { address, rkey: Rkey(rkey) });
        }
    }

    pub fn has_ended(&self) -> bool {
        self.failed || self.end.pair.state() == QueuePairState::Error
    }

    /// Takes the memory, and drops everything else.
    pub fn into_memory(self) -> Arc<HostMemory> {
        self.end.memory
    }
}

/// Returns the bytes that a bad neighbour may change, all of them with the pattern `seed`.
pub fn fill(memory: &HostMemory, seed: u64) {
    memory.copy_in(0, &pattern(seed, GUARD)).unwrap();
}

/// Returns the number of bytes that differ from the pattern `seed`.
pub fn wrong_bytes(memory: &HostMemory, seed: u64) -> usize {
    let expected = pattern(seed, GUARD);
    content(memory, 0, GUARD).iter().zip(expected).filter(|(found, expected)| **found != *expected).count()
}
