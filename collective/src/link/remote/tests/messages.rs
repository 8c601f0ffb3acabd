//! Inline messages: order, content, full rings, many ranks, generations.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_of_one_process_see_one_another_by_views() {
    let ranks = group(3, &settings(VIEWS)).await;
    for (rank, it) in ranks.iter().enumerate() {
        let others: Vec<_> = (0..3).filter(|peer| *peer != rank).collect();
        assert_eq!(it.links.viewed().collect::<Vec<_>>(), others);
        assert_eq!(it.links.inline(), 4096);
    }
    let ranks = group(2, &settings(WRITES)).await;
    assert_eq!(ranks[0].links.viewed().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_all_lengths_arrive_in_order_between_all_pairs() {
    for kind in KINDS {
        let mut ranks = group(3, &settings(kind)).await;
        let inline = ranks[0].links.inline();
        let lengths = [0, 1, 8, 39, 40, 41, 64, 104, 1000, inline - 1, inline];
        let mut number = 0;
        // Five laps around the slots.
        for _ in 0..2 {
            for length in lengths.into_iter().filter(|length| *length <= inline) {
                number += 1;
                for (from, rank) in ranks.iter_mut().enumerate() {
                    for to in (0..3).filter(|to| *to != from) {
                        let payload = content(number * 9 + from as u64 * 3 + to as u64, length);
                        let sent = rank.links.send(to, tag(number), &payload).unwrap();
                        assert!(sent, "there is room");
                    }
                }
                for (to, rank) in ranks.iter_mut().enumerate() {
                    for from in (0..3).filter(|from| *from != to) {
                        let by_pieces = number % 2 == 0;
                        let (found, bytes) = receive(&mut rank.links, from, by_pieces).unwrap();
                        assert_eq!(found, tag(number), "{kind:?}");
                        assert!(
                            bytes == content(number * 9 + from as u64 * 3 + to as u64, length),
                            "{kind:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Devices without immediate data, such as siw, learn of writes by messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_need_no_order_of_placement_and_no_immediate_data() {
    for notification in [Notification::Word, Notification::Immediate, Notification::Message] {
        let mut ranks = noticed_group(2, Some(notification), &settings(WRITES)).await;
        let (sender, receiver) = pair(&mut ranks);
        assert_eq!(sender.links.viewed().count(), 0);
        let mut memory = sender.pool.take(100_000).unwrap();
        memory[..100_000].copy_from_slice(&content(7, 100_000));
        for number in 0..30 {
            let payload = content(number, 20 + number as usize);
            until("room", || {
                receiver.links.progress().unwrap();
                sender.links.send(1, tag(2 * number), &payload).unwrap().then_some(())
            });
            until("room", || {
                receiver.links.progress().unwrap();
                sender.links.send_reference(1, tag(2 * number + 1), &memory, number as usize, 90_000).unwrap()
            });
            let found = receive(&mut receiver.links, 0, true).unwrap();
            assert_eq!(found, (tag(2 * number), payload), "{notification:?}");
            let (found, bytes) = receive(&mut receiver.links, 0, number % 2 == 0).unwrap();
            assert!(found == tag(2 * number + 1) && bytes == memory[number as usize..][..90_000]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_write_unless_both_have_views() {
    let (devices, channels) = mesh(2).await;
    let pools: Vec<_> = devices.iter().map(|device| MemoryPool::new(device, 0)).collect();
    let (auto, write) = (settings(VIEWS), settings(WRITES));
    let (first, second) = tokio::join!(
        RemoteLinks::open(channels[0].clone(), 0, &pools[0], 0, &auto),
        RemoteLinks::open(channels[1].clone(), 1, &pools[1], 0, &write),
    );
    let (mut first, mut second) = (first.unwrap(), second.unwrap());
    assert_eq!((first.viewed().count(), second.viewed().count()), (0, 0));
    assert!(first.send(1, tag(1), b"hello").unwrap());
    assert_eq!(receive(&mut second, 0, true).unwrap(), (tag(1), b"hello".to_vec()));
    assert!(second.send(0, tag(2), b"answer").unwrap());
    assert_eq!(receive(&mut first, 1, false).unwrap(), (tag(2), b"answer".to_vec()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_ring_takes_no_message_until_one_is_taken() {
    for kind in KINDS {
        let mut ranks = group(2, &settings(kind)).await;
        let (sender, receiver) = pair(&mut ranks);
        let (mut sent, mut taken) = (0_u64, 0_u64);
        for round in 0..20 {
            while sent - taken < 4 {
                let payload = sent.to_le_bytes();
                until("room", || {
                    // A receiver by writes reports in its own time.
                    receiver.links.progress().unwrap();
                    sender.links.send(1, tag(sent), &payload).unwrap().then_some(())
                });
                sent += 1;
            }
            assert!(!sender.links.send(1, tag(sent), &[]).unwrap(), "{kind:?}: four slots are in use");
            for _ in 0..1 + round % 4 {
                let (found, bytes) = receive(&mut receiver.links, 0, true).unwrap();
                assert_eq!((found, bytes), (tag(taken), taken.to_le_bytes().to_vec()));
                taken += 1;
            }
        }
        while taken < sent {
            receive(&mut receiver.links, 0, false).unwrap();
            taken += 1;
        }
        until("the last report", || {
            receiver.links.progress().unwrap();
            (sender.links.taken(1).unwrap() == sent).then_some(())
        });
        assert!(receiver.links.peek(0).unwrap().is_none());
        let (sender, receiver) = (sender.links.counters(), receiver.links.counters());
        assert_eq!((sender.sent, sender.inline_bytes, receiver.taken), (sent, sent * 8, sent));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_exchange_many_messages() {
    const MESSAGES: u64 = 20_000;
    for kind in KINDS {
        let mut ranks = group(2, &settings(kind)).await;
        let messages = if kind == VIEWS { MESSAGES } else { MESSAGES / 10 };
        let done = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = ranks
            .drain(..)
            .enumerate()
            .map(|(rank, mut it)| {
                let done = Arc::clone(&done);
                std::thread::spawn(move || {
                    let peer = 1 - rank;
                    let (mut sent, mut taken) = (0, 0);
                    let start = Instant::now();
                    while sent < messages || taken < messages {
                        assert!(start.elapsed() < HANG, "rank {rank} sent {sent} and took {taken}");
                        it.links.progress().unwrap();
                        let payload = content(sent ^ (rank as u64) << 32, (sent % 100) as usize);
                        if sent < messages && it.links.send(peer, tag(sent), &payload).unwrap() {
                            sent += 1;
                        }
                        if let Some((found, length)) = it.links.peek(peer).unwrap() {
                            assert_eq!((found, length), (tag(taken), (taken % 100) as usize));
                            let mut bytes = vec![0; length];
                            assert!(it.links.receive_into(peer, &mut bytes).unwrap());
                            assert!(bytes == content(taken ^ (peer as u64) << 32, length));
                            taken += 1;
                        } else {
                            std::thread::yield_now();
                        }
                    }
                    while it.links.taken(peer).unwrap() < messages {
                        assert!(start.elapsed() < HANG);
                        it.links.progress().unwrap();
                        std::thread::yield_now();
                    }
                    // The other rank may not know yet that all its messages were taken.
                    done.fetch_add(1, Ordering::Relaxed);
                    while done.load(Ordering::Relaxed) < 2 {
                        assert!(start.elapsed() < HANG, "rank {rank} is done, and the other one is not");
                        it.links.progress().unwrap();
                        std::thread::yield_now();
                    }
                    it
                })
            })
            .collect();
        // No rank ends before all are done.
        let join = || threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>();
        drop(tokio::task::spawn_blocking(join).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_sets_and_two_generations_share_the_channels() {
    for kind in KINDS {
        let (devices, mut channels) = mesh(3).await;
        let pools: Vec<_> = devices.iter().map(|device| MemoryPool::new(device, 0)).collect();
        let collective = settings(kind);
        let messages = LinkSettings { names: "messages".into(), ..collective.clone() };
        let mut first = open_all(&mut channels, &pools, 0, &collective).await;
        let mut second = open_all(&mut channels, &pools, 0, &messages).await;
        assert!(first[0].send(1, tag(1), b"first").unwrap());
        assert!(second[0].send(1, tag(2), b"second").unwrap());
        assert_eq!(receive(&mut second[1], 0, true).unwrap(), (tag(2), b"second".to_vec()));

        // Ranks 0 and 2 go on without rank 1. The old message stays where it is.
        let mut survivors: Vec<Vec<_>> =
            [0, 2].map(|rank| [0, 2].map(|peer| channels[rank][peer as usize].clone()).to_vec()).to_vec();
        let pools = [pools[0].clone(), pools[2].clone()];
        let mut after = open_all(&mut survivors, &pools, 1, &collective).await;
        assert!(after[0].peek(1).unwrap().is_none());
        assert!(after[1].send(0, tag(3), b"after").unwrap());
        assert_eq!(receive(&mut after[0], 1, true).unwrap(), (tag(3), b"after".to_vec()));
        assert_eq!(receive(&mut first[1], 0, true).unwrap(), (tag(1), b"first".to_vec()));
    }
}

/// After a failure, the survivors drop their old links at different times. A rank that drops them later must
/// not write to a peer that has withdrawn its memory, because that would end the channel which the new links
/// use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_that_are_given_up_do_no_harm_to_the_next_ones() {
    for kind in KINDS {
        let (devices, mut channels) = mesh(2).await;
        let pools: Vec<_> = devices.iter().map(|device| MemoryPool::new(device, 0)).collect();
        let mut old = open_all(&mut channels, &pools, 0, &settings(kind)).await;
        assert!(old[0].send(1, tag(1), b"old").unwrap());
        until("the message", || {
            old[1].peek(0).unwrap()?;
            old[1].receive(0, &mut |_, _| ()).unwrap().then_some(())
        });
        old.iter_mut().for_each(RemoteLinks::give_up);
        let mut new = open_all(&mut channels, &pools, 1, &settings(kind)).await;
        // Rank 0 withdraws its memory first. Rank 1 has not reported yet that it took the message.
        drop(old.remove(0));
        drop(old);
        for round in 0..20 {
            until("room", || {
                new.iter_mut().for_each(|links| links.progress().unwrap());
                new[0].send(1, tag(round), b"new").unwrap().then_some(())
            });
            assert_eq!(receive(&mut new[1], 0, true).unwrap(), (tag(round), b"new".to_vec()));
        }
        assert!(channels.iter().flatten().flatten().all(|channel| channel.is_open()), "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_set_up_that_cannot_succeed_says_why() {
    let (devices, channels) = mesh(2).await;
    let pool = MemoryPool::new(&devices[0], 0);
    let short = LinkSettings { limit: Duration::from_millis(300), ..settings(VIEWS) };

    let error = RemoteLinks::open(channels[0].clone(), 0, &pool, 0, &short).await.err().unwrap();
    assert!(
        error.to_string().contains("no links to rank 1") && error.to_string().contains("300ms"),
        "{error}"
    );
    let error = RemoteLinks::open(vec![None, None], 0, &pool, 1, &short).await.err().unwrap();
    assert!(error.to_string().contains("no channel to rank 1"), "{error}");
    let error = RemoteLinks::open(vec![None], 1, &pool, 1, &short).await.err().unwrap();
    assert!(error.to_string().contains("rank 1 of 1"), "{error}");
    assert!(RemoteLinks::open(vec![None], 0, &pool, 1, &short).await.is_ok(), "a group of one");

    // The other rank has another number of slots.
    let other = MemoryPool::new(&devices[1], 0);
    let long = settings(VIEWS);
    let more = LinkSettings { slots: 8, ..long.clone() };
    // The first rank that finds the difference ends, and the other one would wait for it.
    let found = tokio::select! {
        found = RemoteLinks::open(channels[0].clone(), 0, &pool, 2, &long) => found,
        found = RemoteLinks::open(channels[1].clone(), 1, &other, 2, &more) => found,
    };
    let error = found.err().unwrap();
    assert!(error.to_string().contains("other settings"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_with_bad_arguments_fail() {
    let mut ranks = group(2, &settings(VIEWS)).await;
    let memory = ranks[0].pool.take(100).unwrap();
    let long = vec![0; 5000];
    for rank in [0, 2, usize::MAX] {
        assert!(ranks[0].links.send(rank, tag(0), &[]).is_err());
        assert!(ranks[0].links.peek(rank).is_err());
        assert!(ranks[0].links.taken(rank).is_err());
    }
    assert!(ranks[0].links.send_reference(1, tag(0), &memory, memory.len(), 1).is_err());
    assert!(ranks[1].links.send(0, tag(0), &long).is_err());
}
