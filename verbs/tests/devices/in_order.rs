//! The promise of a device that places in order ([`QueuePair::places_in_order`]): a thread that sees the last
//! word of a transfer sees all of the transfer, and all earlier transfers. A separate thread watches that
//! word all the time, and checks every byte as soon as the word has arrived.

use std::io::{IoSlice, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tonic_rdma_verbs::{
    CompletionOpcode, HostMemory, LocalSegment, MemoryRegion, Operation, Payload, QueuePair, SendRequest,
};

use crate::fabric::{Fabric, Options, Side, connected, content, pattern, remote, segment, wait_until};

/// Offset of the end of every transfer.
const END: usize = 1 << 20;
/// Offset of the last word of every transfer.
const WORD: usize = END - 8;
const ROUNDS: u64 = 4000;

fn ordered(fabric: &dyn Fabric, pair: &Arc<dyn QueuePair>) -> bool {
    let ordered = pair.places_in_order();
    if !ordered {
        assert_ne!(fabric.name(), "soft", "the software device places in order");
        let _ = writeln!(std::io::stderr(), "left out: {} promises no order", fabric.name());
    }
    ordered
}

fn sides(fabric: &dyn Fabric) -> (Side, Side) {
    connected(fabric, &Options { memory: END + 4096, ..Options::default() })
}

/// Returns a pseudo-random number that depends only on the arguments, so that runs can be repeated.
fn random(round: u64, salt: u64) -> usize {
    fastrand::Rng::with_seed(round * 4 + salt + 1).usize(..)
}

/// Returns the number of bytes of a round: 8 bytes to 1 MiB, in most rounds few.
fn length(round: u64) -> usize {
    match round % 16 {
        0 => 8,
        1 => END,
        2..4 => 8 + random(round, 0) % (END - 7),
        4..8 => 8 + random(round, 0) % 8192,
        _ => 8 + random(round, 0) % 120,
    }
}

/// Returns the message of a round. The last words of all messages differ.
fn message(round: u64) -> Vec<u8> {
    let mut bytes = pattern(round, length(round));
    let word = bytes.len() - 8;
    bytes[word..].copy_from_slice(&(round + 1).to_ne_bytes());
    bytes
}

/// Cuts `length` bytes at `offset` into up to four chunks. The last chunk has at least `last` bytes.
fn chunks(region: &Arc<dyn MemoryRegion>, offset: usize, round: u64, last: usize) -> Vec<LocalSegment> {
    let length = length(round);
    let mut cuts = vec![0, length];
    cuts.extend((0..round % 4).map(|cut| match random(round, cut) {
        // In half of the cases, the cut lies in the last word or at most a byte before the word.
        some if some % 2 == 0 => length - last.max(some / 2 % 10).min(length),
        some => some % (length - last + 1),
    }));
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|cut| segment(region, offset + cut[0], cut[1] - cut[0])).collect()
}

/// Runs `start` for each round. As soon as the last word of the round is in `memory`, checks every byte that
/// the round places before [`END`].
fn watch(memory: &HostMemory, rounds: u64, start: impl Fn(u64), expected: impl Fn(u64) -> Vec<u8> + Sync) {
    let ready = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..rounds {
                let expected = expected(round);
                let mut found = vec![0; expected.len()];
                ready.store(round + 1, Ordering::Release);
                wait_until("the last word", || {
                    (0..1000).any(|_| memory.load_u64(WORD).unwrap() == round + 1)
                });
                memory.copy_out(END - expected.len(), &mut found).unwrap();
                let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
                assert_eq!(wrong, None, "round {round}, {} bytes: not there yet", expected.len());
            }
        });
        for round in 0..rounds {
            // The watcher has seen the previous round, and waits for this one.
            wait_until("the watcher", || (0..1000).any(|_| ready.load(Ordering::Acquire) == round + 1));
            start(round);
        }
    });
}

pub fn writes_placed_in_order(fabric: &dyn Fabric) {
    let (a, b) = sides(fabric);
    if !ordered(fabric, &b.pair) {
        return;
    }
    let private = b.private_region(END);
    for (region, rounds) in [(&b.region, ROUNDS), (&private, ROUNDS / 4)] {
        // In private memory the end is a multiple of 8, too.
        assert_eq!(region.memory().address() % 8, 0);
        let start = |round| {
            let message = message(round);
            let offset = random(round, 3) % 64;
            a.fill(offset, &message);
            let segments = chunks(&a.region, offset, round, 0);
            let slices = [IoSlice::new(&message)];
            let data = match a.inline(message.len()) == message.len() && round % 2 == 0 {
                true => Payload::Inline(&slices),
                false => Payload::Registered(&segments),
            };
            let remote = remote(region, END - message.len());
            a.post(round, Operation::Write { data, remote, immediate: None });
            a.expect(round, CompletionOpcode::Write);
        };
        watch(region.memory(), rounds, start, message);
    }
}

pub fn reads_placed_in_order(fabric: &dyn Fabric) {
    let (a, b) = sides(fabric);
    if !ordered(fabric, &a.pair) {
        return;
    }
    let most = a.context.attributes().max_read_segments.min(4) as usize;
    let private = b.private_region(END + 64);
    for (region, rounds) in [(&b.region, ROUNDS), (&private, ROUNDS / 4)] {
        a.fill(WORD, &[0; 8]);
        let start = |round| {
            let message = message(round);
            let offset = random(round, 3) % 64;
            region.memory().copy_in(offset, &message).unwrap();
            let mut into = chunks(&a.region, END - message.len(), round, 8);
            if into.len() > most {
                into = vec![a.segment(END - message.len(), message.len())];
            }
            a.post(round, Operation::Read { into: &into, remote: remote(region, offset) });
            a.expect(round, CompletionOpcode::Read);
        };
        watch(a.region.memory(), rounds, start, message);
    }
}

/// A separate WRITE stores the last word, after WRITEs that end at any address.
pub fn writes_placed_one_after_another(fabric: &dyn Fabric) {
    let (a, b) = sides(fabric);
    if !ordered(fabric, &b.pair) {
        return;
    }
    let start = |round: u64| {
        let message = message(round);
        a.fill(0, &message);
        let rest = message.len() - 8;
        let at = b.remote(END - message.len());
        let first = rest - rest.min(random(round, 0) % 20);
        let cuts = [(0, first), (first, rest), (rest, message.len())];
        let segments = cuts.map(|(from, to)| [a.segment(from, to - from)]);
        let requests: Vec<_> = std::iter::zip(cuts, &segments)
            .map(|((from, to), segments)| {
                let mut remote = at;
                remote.address += from as u64;
                let data = Payload::Registered(segments);
                let operation = Operation::Write { data, remote, immediate: None };
                SendRequest { wr_id: round, operation, signaled: to == message.len() }
            })
            .collect();
        a.pair.post_send(&requests).unwrap();
        a.expect(round, CompletionOpcode::Write);
    };
    watch(b.region.memory(), ROUNDS, start, message);
    assert_eq!(content(&b.region, END, 4096), [0; 4096], "nothing beyond");
}
