//! References: reads of many lengths and offsets, release, reuse of memory.

use support::is_alone;
use tonic_rdma_verbs::counting;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn references_of_all_lengths_and_offsets_are_pulled() {
    for kind in KINDS {
        let mut ranks = group(2, &settings(kind)).await;
        let (sender, receiver) = pair(&mut ranks);
        let mut read = 0;
        let lengths = [0, 1, 63, 64, 65, 4097, 65_535, 65_536, 65_537, 200_001, 3 << 20];
        for (at, length) in lengths.into_iter().enumerate() {
            for offset in [0, 1, 12_345] {
                let mut memory = sender.pool.take(offset + length).unwrap();
                let payload = content(at as u64, length);
                memory[offset..offset + length].copy_from_slice(&payload);
                let operation = read as u64;
                let number =
                    sender.links.send_reference(1, tag(operation), &memory, offset, length).unwrap().unwrap();
                assert_eq!(sender.links.taken(1).unwrap(), number, "not taken yet");
                let (found, bytes) = receive(&mut receiver.links, 0, offset % 2 == 1).unwrap();
                assert!(found == tag(operation) && bytes == payload, "{kind:?} {length} at {offset}");
                until("the release", || {
                    receiver.links.progress().unwrap();
                    (sender.links.taken(1).unwrap() > number).then_some(())
                });
                read += length;
            }
        }
        let (sent, received) = (sender.links.counters(), receiver.links.counters());
        assert_eq!((sent.referenced_bytes, received.read_bytes), (read as u64, read as u64));
        assert_eq!(sent.copied_bytes, 0, "no copy at the sender");
        if kind == VIEWS {
            assert_eq!(received.copied_bytes, 0, "no copy beside the move itself");
        }
        assert!(sender.pool.take(8 << 20).unwrap().number() <= 20, "memory is used again");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pull_of_a_long_message_takes_several_calls() {
    for kind in KINDS {
        let mut ranks = group(2, &settings(kind)).await;
        let (sender, receiver) = pair(&mut ranks);
        let memory = sender.pool.take(1 << 20).unwrap();
        sender.links.send_reference(1, tag(1), &memory, 0, 1 << 20).unwrap().unwrap();
        assert!(sender.links.send(1, tag(2), b"behind").unwrap());
        let (mut calls, mut bytes) = (0, 0);
        until("the read", || {
            receiver.links.progress().unwrap();
            receiver.links.peek(0).unwrap()?;
            let before = bytes;
            let ended = receiver.links.receive(0, &mut |_, chunk| bytes += chunk.len()).unwrap();
            assert!(bytes - before <= 64 << 10, "one call gives one chunk at most");
            calls += usize::from(bytes > before);
            ended.then_some(())
        });
        assert_eq!((calls, bytes), (16, 1 << 20));
        assert_eq!(receive(&mut receiver.links, 0, true).unwrap().1, b"behind");
    }
}

/// In a process of its own, because other tests ask for something, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_queue_pairs_take_the_reads_in_turn() {
    const PAIRS: u32 = 4;
    if !is_alone(concat!(module_path!(), "::the_queue_pairs_take_the_reads_in_turn")) {
        return;
    }
    let counter = counting::count_all();
    let mut ranks =
        built_group(2, || RdmaDevice::builder().queue_pairs_per_peer(PAIRS), &settings(WRITES)).await;
    let (sender, receiver) = pair(&mut ranks);
    let mut memory = sender.pool.take(1 << 20).unwrap();
    memory[..1 << 20].copy_from_slice(&content(3, 1 << 20));
    sender.links.send_reference(1, tag(1), &memory, 0, 1 << 20).unwrap().unwrap();
    let before = counter.queue_pairs();
    assert!(receive(&mut receiver.links, 0, false).unwrap().1 == content(3, 1 << 20));
    let moved: Vec<_> =
        counter.queue_pairs().iter().map(|(pair, now)| now.bytes - before[pair].bytes).collect();
    // Four chunks of 64 KiB by each. All else that goes meanwhile is shorter than one.
    let readers: Vec<_> =
        moved.into_iter().filter(|bytes| *bytes >= 64 << 10).map(|bytes| bytes >> 16).collect();
    assert_eq!(readers, [4; PAIRS as usize]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inline_messages_and_references_of_many_memories_keep_their_order() {
    for kind in KINDS {
        // Fewer regions stay attached than are in use.
        let settings = LinkSettings { attached: 2, ..settings(kind) };
        let mut ranks = group(2, &settings).await;
        let (sender, receiver) = pair(&mut ranks);
        let mut memories: Vec<_> = (0..4).map(|_| sender.pool.take(70_000).unwrap()).collect();
        for (at, memory) in memories.iter_mut().enumerate() {
            memory[..70_000].copy_from_slice(&content(at as u64, 70_000));
        }
        for round in 0..24_u64 {
            let which = (round * round) as usize % 4;
            let (inline, reference) = (content(round, 10), content(which as u64, 70_000));
            until("room", || {
                receiver.links.progress().unwrap();
                sender.links.send_reference(1, tag(2 * round), &memories[which], 0, 70_000).unwrap()
            });
            until("room", || {
                receiver.links.progress().unwrap();
                sender.links.send(1, tag(2 * round + 1), &inline).unwrap().then_some(())
            });
            assert!(receive(&mut receiver.links, 0, round % 2 == 0).unwrap() == (tag(2 * round), reference));
            assert_eq!(receive(&mut receiver.links, 0, true).unwrap(), (tag(2 * round + 1), inline));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_the_pool_gave_up_is_forgotten() {
    for kind in KINDS {
        let mut ranks = group(2, &settings(kind)).await;
        let (sender, receiver) = pair(&mut ranks);
        for round in 0..10 {
            let mut memory = sender.pool.take(10_000).unwrap();
            memory[..10_000].copy_from_slice(&content(round, 10_000));
            memory.retire();
            until("room", || {
                receiver.links.progress().unwrap();
                sender.links.send_reference(1, tag(round), &memory, 0, 10_000).unwrap()
            });
            assert!(receive(&mut receiver.links, 0, false).unwrap().1 == content(round, 10_000));
        }
        assert_eq!(
            sender.pool.take(10_000).unwrap().number(),
            11,
            "{kind:?}: retired memory is not used again"
        );
    }
}

/// Memory that a peer has mapped stays pinned at its owner, so a view must not last until the next message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_view_of_memory_that_was_withdrawn_is_dropped() {
    let mut ranks = group(2, &settings(VIEWS)).await;
    let (sender, receiver) = pair(&mut ranks);
    let mut memory = sender.pool.take(10_000).unwrap();
    memory.retire();
    sender.links.send_reference(1, tag(0), &memory, 0, 10_000).unwrap().unwrap();
    receive(&mut receiver.links, 0, false).unwrap();
    assert_eq!(receiver.links.attached(0), 1);
    drop(memory);
    until("the end of the view", || {
        receiver.links.progress().unwrap();
        (receiver.links.attached(0) == 0).then_some(())
    });
}
