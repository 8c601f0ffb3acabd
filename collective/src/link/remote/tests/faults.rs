//! Hostile peers, and peers that die.

use std::io::IoSlice;

use tonic_rdma_tensor::{ExportedRegion, RemoteRegion, Rights, SharedRegion};

use super::*;
use crate::link::LinkFault;
use crate::link::remote::message::{ElementReference, Header, Layout};

/// A rank that speaks the set-up, and then puts any bytes where it likes.
struct Hostile {
    kind: bool,
    layout: Layout,
    section: usize,
    outbox: SharedRegion,
    channel: Channel,
    ring: Option<RemoteRegion>,
    pool: MemoryPool,
    _exported: Vec<ExportedRegion>,
    _device: RdmaDevice,
}

/// Makes an honest rank 0, and a hostile rank 1.
async fn with_hostile(kind: bool) -> (RemoteLinks, Hostile, RdmaDevice, MemoryPool) {
    let (mut devices, channels) = mesh(2).await;
    let (bad, good) = (devices.pop().unwrap(), devices.pop().unwrap());
    let settings = settings(kind);
    let pools = [MemoryPool::new(&good, 0), MemoryPool::new(&bad, 0)];
    let layout = settings.layout();
    let outbox = bad.allocate(layout.bytes() * 2).unwrap().share();
    let names = format!("{}/0", settings.names);
    // The hello of an honest rank, copied from what an honest rank writes.
    let (mine, theirs) = tokio::join!(
        RemoteLinks::open(channels[0].clone(), 0, &pools[0], 0, &settings),
        hostile(kind, layout, &outbox, &names, &bad, channels[1][0].clone().unwrap(), &pools[1]),
    );
    (mine.unwrap(), theirs, good, pools.into_iter().next().unwrap())
}

async fn hostile(
    kind: bool,
    layout: Layout,
    outbox: &SharedRegion,
    names: &str,
    device: &RdmaDevice,
    channel: Channel,
    pool: &MemoryPool,
) -> Hostile {
    // Sections are numbered by rank, and rank 0 is the first.
    let section = 0;
    let view = if kind == VIEWS { 1 } else { 2 };
    let sizes = u64::from(layout.slots) << 32 | u64::from(layout.inline);
    for (at, word) in [0x6c69_6e6b_7300_0003, sizes, 1, pool.number(), view].into_iter().enumerate() {
        outbox.store_u64(section + Layout::HELLO + 8 * at, word).unwrap();
    }
    let mut exported =
        vec![device.export_shared(&format!("{names}/1/outbox"), outbox.clone(), Rights::READ).unwrap()];
    let mut ring = None;
    if kind == WRITES {
        let own = device.allocate(layout.bytes()).unwrap();
        exported.push(device.export(&format!("{names}/1/ring/0"), own, Rights::WRITE).unwrap());
        let start = Instant::now();
        while ring.is_none() {
            assert!(start.elapsed() < HANG);
            ring = channel.region(&format!("{names}/0/ring/1")).await.ok();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    Hostile {
        kind,
        layout,
        section,
        outbox: outbox.clone(),
        channel,
        ring,
        pool: pool.clone(),
        _exported: exported,
        _device: device.clone(),
    }
}

impl Hostile {
    /// Puts bytes into the slot of message `number`.
    fn put(&self, number: u64, bytes: &[u8]) {
        let slot = self.layout.slot(number);
        match &self.ring {
            None => {
                self.outbox.copy_in(self.section + slot + 8, &bytes[8..]).unwrap();
                let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                self.outbox.store_u64(self.section + slot, word).unwrap();
            }
            Some(ring) => {
                let write = self.channel.write(ring).at(slot as u64).notify(true);
                write.bytes(&[IoSlice::new(bytes)]).unwrap();
            }
        }
    }

    /// Says that it took `count` messages.
    fn claim(&self, count: u64) {
        match &self.ring {
            None => self.outbox.store_u64(self.section + Layout::TAKEN, count).unwrap(),
            Some(ring) => {
                let bytes = [count.to_le_bytes(), (!count).to_le_bytes()].concat();
                self.channel.write(ring).at(0).bytes(&[IoSlice::new(&bytes)]).unwrap();
            }
        }
    }
}

/// Polls the link from rank 1 until it fails, and returns the broken rule.
fn violation_of(links: &mut RemoteLinks) -> String {
    let mut poll = || -> Result<(), LinkError> {
        links.progress()?;
        links.taken(1)?;
        if links.peek(1)?.is_some() {
            links.receive(1, &mut |_, _| {})?;
        }
        Ok(())
    };
    let error = until("a violation", || poll().err());
    assert_eq!(error.rank, 1);
    assert!(poll().is_err(), "the link stays failed");
    match error.cause {
        LinkFault::Violation(what) => what.to_string(),
        LinkFault::Lost(error) => panic!("lost: {error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reference_to_memory_that_is_not_there_is_a_violation() {
    for kind in KINDS {
        let cases: [(Option<usize>, u64, u64, &str); 5] = [
            (Some(8192), 8000, 1000, "1000 bytes at offset 8000 of its memory 1 of 8192 bytes"),
            (Some(8192), u64::MAX, 2, "2 bytes at offset 18446744073709551615"),
            (Some(8192), 1, u64::MAX, "18446744073709551615 bytes at offset 1"),
            (Some(8192), 8192, 1, "1 bytes at offset 8192"),
            (None, 0, 10, "refers to its memory 77, and refuses"),
        ];
        for (memory, offset, length, expected) in cases {
            let (mut links, hostile, _device, _pool) = with_hostile(kind).await;
            let memory = memory.map(|bytes| hostile.pool.take(bytes).unwrap());
            let number = memory.as_ref().map_or(77, |memory| memory.number());
            let reference = ElementReference { number, offset, length }.to_bytes();
            hostile.put(0, &[&Header::reference(0, tag(0)).to_bytes()[..], &reference].concat());
            let found = violation_of(&mut links);
            assert!(found.contains(expected), "{kind:?}: {found}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_too_long_or_out_of_turn_is_a_violation() {
    for kind in KINDS {
        let (mut links, hostile, _device, _pool) = with_hostile(kind).await;
        hostile.put(0, &Header::inline(0, tag(0), 5000).to_bytes());
        let found = violation_of(&mut links);
        assert!(found.contains("an inline message of 5000 bytes; the limit is 4096"), "{found}");

        let (mut links, hostile, _device, _pool) = with_hostile(kind).await;
        hostile.put(0, &Header::inline(3, tag(0), 0).to_bytes());
        let found = violation_of(&mut links);
        assert!(found.contains("the slot of message 0"), "{found}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_count_of_taken_messages_is_a_violation() {
    for kind in KINDS {
        for count in [3, u64::MAX] {
            let (mut links, hostile, _device, _pool) = with_hostile(kind).await;
            assert!(links.send(1, tag(0), &[1]).unwrap() && links.send(1, tag(1), &[2]).unwrap());
            hostile.claim(count);
            let found = violation_of(&mut links);
            assert!(found.contains("2 were sent"), "{kind:?}: {found}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_beyond_the_ring_are_a_violation() {
    let (mut links, hostile, _device, _pool) = with_hostile(WRITES).await;
    for number in 0..6 {
        hostile.put(number, &Header::inline(number, tag(number), 0).to_bytes());
    }
    let error = until("a violation", || links.progress().err());
    assert!(
        matches!(&error.cause, LinkFault::Violation(what) if what.contains("4 messages ahead")),
        "{error:?}"
    );
}

/// Random lines: each is refused, or read as some message. None makes a panic, and none a hang.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_lines_do_no_harm() {
    for kind in KINDS {
        for seed in 0..12 {
            let (mut links, hostile, _device, _pool) = with_hostile(kind).await;
            let mut line = content(seed, 64);
            if seed % 3 > 0 {
                // The number fits, so that the rest is checked.
                line[..8].copy_from_slice(&Header::inline(0, tag(0), 0).to_bytes()[..8]);
                let length = if seed % 3 == 1 { [0xff, 0xff] } else { [line[20], line[21] & 15] };
                line[..2].copy_from_slice(&length);
            }
            hostile.put(0, &line);
            let ended = until("a result", || {
                if let Err(error) = links.progress() {
                    return Some(Err(error));
                }
                match links.peek(1) {
                    Ok(Some(_)) => {
                        links.receive(1, &mut |_, _| {}).map(|ended| ended.then_some(())).transpose()
                    }
                    Ok(None) => None,
                    Err(error) => Some(Err(error)),
                }
            });
            if let Err(error) = ended {
                assert!(matches!(error.cause, LinkFault::Violation(_)), "{:?}: {error:?}", hostile.kind);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_goes_is_lost_after_its_last_message() {
    for kind in KINDS {
        let mut ranks = group(3, &settings(kind)).await;
        let gone = ranks.remove(1);
        let (first, third) = pair(&mut ranks);
        let mut gone_lanes = gone.links;
        assert!(gone_lanes.send(0, tag(0), b"the last").unwrap());
        // The message is here before its sender ends.
        until("the message", || {
            first.links.progress().unwrap();
            first.links.peek(1).unwrap()
        });
        drop((gone_lanes, gone.pool, gone.device));
        for it in [&mut *first, &mut *third] {
            until("the loss", || {
                it.links.progress().unwrap();
                it.links.send(1, tag(9), &[]).err()
            });
        }
        assert_eq!(receive(&mut first.links, 1, true).unwrap().1, b"the last");
        let error = first.links.peek(1).err().unwrap();
        assert!(matches!(error.cause, LinkFault::Lost(_)) && error.rank == 1, "{kind:?}: {error:?}");
        let error = until("the loss", || third.links.peek(1).err());
        assert!(matches!(error.cause, LinkFault::Lost(_)), "{kind:?}: {error:?}");

        // The others go on.
        assert!(first.links.send(1 + 1, tag(1), b"go on").unwrap());
        assert_eq!(receive(&mut third.links, 0, true).unwrap().1, b"go on");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_came_before_the_loss_is_received() {
    for kind in KINDS {
        let mut ranks = group(2, &settings(kind)).await;
        let gone = ranks.remove(1);
        let mut it = ranks.remove(0);
        let mut links = gone.links;
        assert!(links.send(0, tag(4), b"the last").unwrap());
        until("the message", || {
            it.links.progress().unwrap();
            it.links.peek(1).unwrap()
        });
        drop((links, gone.pool, gone.device));
        // Long enough for the watch to see it, and for each check of the channels.
        tokio::time::sleep(Duration::from_millis(200)).await;
        for _ in 0..10_000 {
            it.links.progress().unwrap();
        }
        assert_eq!(receive(&mut it.links, 1, true).unwrap(), (tag(4), b"the last".to_vec()));
        let error = until("the loss", || {
            it.links.progress().unwrap();
            it.links.peek(1).err()
        });
        assert!(matches!(error.cause, LinkFault::Lost(_)), "{kind:?}: {error:?}");
    }
}

/// The peer ends at some moment of a stream of messages and references.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_goes_at_any_moment_is_lost_and_never_hangs() {
    for kind in KINDS {
        for moment in 0..12_u64 {
            let mut ranks = group(2, &settings(kind)).await;
            let mut gone = ranks.remove(1);
            let mut it = ranks.remove(0);
            let memory = gone.pool.take(300_000).unwrap();
            let sender = std::thread::spawn(move || {
                for number in 0..moment {
                    let sent = if number % 2 == 0 {
                        gone.links.send_reference(0, tag(number), &memory, 0, 300_000).unwrap().is_some()
                    } else {
                        gone.links.send(0, tag(number), &[7; 30]).unwrap()
                    };
                    if !sent {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    gone.links.progress().unwrap();
                }
                drop(gone);
                drop(memory);
            });
            let error = until("the loss", || {
                if let Err(error) = it.links.progress() {
                    return Some(error);
                }
                match it.links.peek(1) {
                    Ok(Some((_, length))) => {
                        let mut seen = 0;
                        match it.links.receive(1, &mut |_, chunk| seen += chunk.len()) {
                            Ok(_) => assert!(seen <= length),
                            Err(error) => return Some(error),
                        }
                        None
                    }
                    Ok(None) => None,
                    Err(error) => Some(error),
                }
            });
            sender.join().unwrap();
            assert_eq!(error.rank, 1);
            if let LinkFault::Violation(what) = &error.cause {
                // The peer withdrew its memory before its link ended.
                assert!(what.contains("withdrew") || what.contains("refuses"), "{kind:?} {moment}: {what}");
            }
        }
    }
}
