//! Fetches: content, alignment, many at a time, and memory that runs out.

use std::time::Duration;

use bytes::Bytes;

use super::side::{Side, endpoints, pair, pattern, settings, side};
use crate::endpoint::config::Config;
use crate::endpoint::messages::MessageSettings;
use tonic_rdma_verbs::memory::Pool;

/// Waits until fetch `id` has landed; returns its content.
async fn landed(end: &Side, id: u64) -> Bytes {
    end.until("it landed", |it| it.landed.contains_key(&id)).await;
    end.with(|it| it.landed.remove(&id)).unwrap().expect("not cancelled")
}

/// Waits until the peer has taken all offers.
async fn all_taken(end: &Side) {
    let wait = async {
        while end.offered() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(super::side::TIMEOUT, wait).await.expect("offers that were not taken");
}

#[tokio::test]
async fn content_of_any_length_lands_whole_and_aligned() {
    let (client, server) = pair(&Config::default(), &settings()).await;
    let lengths = [1, 7, 63, 64, 65, 4095, 4096, 65_537, (1 << 20) - 3, 3 << 20];
    for (id, length) in lengths.into_iter().enumerate() {
        for (aligned_at, first) in [(0, 0), (5, 5), (13, 13), (70, 200)] {
            let id = (id * 1000 + first) as u64;
            let (head, content) = (pattern(first, id), pattern(length, id + 1));
            client.offer(id, &head, content.clone().into(), aligned_at);
            let whole = landed(&server, id).await;
            assert!(whole == [head, content].concat(), "{length} bytes behind {first}");
            let place = whole.as_ptr() as usize + aligned_at as usize;
            assert_eq!(place % 64, 0, "{length} bytes behind {first}");
        }
    }
    all_taken(&client).await;
    let counters = server.endpoint.info().counters();
    assert!(counters.landed_bytes > 4 << 20 && counters.reads > 40, "{counters:?}");
    assert!(client.endpoint.info().counters().offered_copied_bytes > 4 << 20);
}

#[tokio::test]
async fn the_longest_content_lands_from_where_the_application_wrote_it() {
    let (client, server) = pair(&Config::default(), &settings()).await;
    let content = pattern(64 << 20, 3);
    let mut buffer = Pool::for_sending(128 << 20).allocate(content.len()).unwrap();
    buffer.copy_from_slice(&content);
    let bytes = buffer.freeze();
    client.offer(1, b"prefix", bytes.slice(100..), 6);
    let whole = landed(&server, 1).await;
    assert!(whole[..6] == *b"prefix" && whole[6..] == content[100..]);
    assert_eq!((whole.as_ptr() as usize + 6) % 64, 0);
    all_taken(&client).await;
    let counters = client.endpoint.info().counters();
    assert_eq!(counters.offered_in_place_bytes, (64 << 20) - 100);
    assert_eq!(counters.offered_copied_bytes, 0);
}

/// Without the right to, a peer reads nothing of the application's memory: the content is copied.
#[tokio::test]
async fn memory_is_exposed_only_if_the_settings_allow_that() {
    let closed = MessageSettings { expose: false, ..settings() };
    let (client, server) = pair(&Config::default(), &closed).await;
    let mut buffer = Pool::for_sending(1 << 20).allocate(100_000).unwrap();
    buffer.fill(9);
    client.offer(1, &[], buffer.freeze(), 0);
    assert!(landed(&server, 1).await.iter().all(|&byte| byte == 9));
    let counters = client.endpoint.info().counters();
    assert_eq!((counters.offered_in_place_bytes, counters.offered_copied_bytes), (0, 100_000));
}

/// Many fetches and many small messages pass at the same time, both ways.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_fetches_run_beside_small_messages() {
    let (client, server) = pair(&Config::default(), &settings()).await;
    let length = |id: u64| (id as usize * 37_501) % 300_000 + 1;
    for id in 0..100 {
        client.offer(id, &[1; 9], pattern(length(id), id).into(), 9);
        server.offer(id, &[2; 9], pattern(length(id), id).into(), 9);
        (0..10).for_each(|_| client.send(&id.to_le_bytes()));
        (0..10).for_each(|_| server.send(&id.to_le_bytes()));
    }
    for (end, mark) in [(&client, 2), (&server, 1)] {
        end.until("all came", |it| it.landed.len() == 100 && it.messages.len() == 1000).await;
        end.with(|it| {
            for (id, content) in &it.landed {
                let content = content.as_ref().unwrap();
                assert!(content[..9] == [mark; 9] && content[9..] == pattern(length(*id), *id), "fetch {id}");
            }
            assert!(it.messages.iter().map(|it| u64::from_le_bytes(it[..].try_into().unwrap())).is_sorted());
        });
    }
    all_taken(&client).await;
    all_taken(&server).await;
}

/// Content beyond the landing budget waits until the application drops some, and nothing else waits.
#[tokio::test]
async fn without_memory_a_fetch_waits_until_there_is_some() {
    let small = MessageSettings { landing_budget: 4 << 20, ..settings() };
    let (client, server) = pair(&Config::default(), &small).await;
    for id in 0..20 {
        client.offer(id, &[], pattern(1 << 20, id).into(), 0);
    }
    client.send(b"passes");
    server.until("it waits", |it| it.stalls > 0 && !it.messages.is_empty()).await;
    server.with(|it| assert!(it.landed.len() < 20));
    for id in 0..20 {
        assert!(landed(&server, id).await == pattern(1 << 20, id), "fetch {id}");
    }
    all_taken(&client).await;
}

/// Memory that comes back without a notice, such as that of another connection, is found soon, although
/// nothing else happens on the connection. Until then the connection asks seldom.
#[tokio::test]
async fn memory_that_comes_back_without_a_notice_is_found() {
    /// Much less than the time between pings, which would hide a wake-up that is missing.
    const SOON: Duration = Duration::from_secs(60);
    let config =
        Config::default().ping_interval(Duration::from_secs(300)).ping_timeout(Duration::from_secs(60));
    let (client, server) = pair(&config, &settings()).await;
    server.with(|it| it.holds_offers = true);
    // The client's supervisor has begun, and waits for the next ping.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let content = Bytes::from(pattern(4 << 20, 1));
    let offers = (0..1000).find(|&id| {
        client.offer(id, &[], content.clone(), 0);
        client.waiting_offers() > 0
    });
    let last = offers.expect("the memory runs out");
    // Everything in flight arrives, so that no message wakes the client later.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(client.waiting_offers(), 1);
    client.with(|it| it.refused = 0);
    tokio::time::sleep(Duration::from_millis(400)).await;
    let refused = client.with(|it| it.refused);
    assert!(refused < 20, "asked {refused} times in 0.4 s");
    client.free_offer(last - 1);
    let all_offered = async {
        while client.waiting_offers() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, all_offered).await.expect("the connection asks for memory again");
}

/// Content that has landed in the reserve, and that no reader takes, leaves the reserve to what comes next.
#[tokio::test]
async fn content_that_is_not_taken_leaves_the_reserve_to_others() {
    let small = MessageSettings { landing_budget: 1 << 20, ..settings() };
    let (client, server) = pair(&Config::default(), &small).await;
    for id in 0..10 {
        client.offer(id, &[], pattern(500_000, id).into(), 5);
    }
    server.until("all have landed", |it| it.landed.len() == 10).await;
    for id in 0..10 {
        let content = landed(&server, id).await;
        assert!(content == pattern(500_000, id), "fetch {id}");
        assert_eq!((content.as_ptr() as usize + 5) % 64, 0, "fetch {id}");
    }
}

#[tokio::test]
async fn landed_memory_may_be_kept_up_to_the_budget() {
    let small = MessageSettings { landing_budget: 4 << 20, ..settings() };
    let (client, server) = pair(&Config::default(), &small).await;
    let mut kept = Vec::new();
    for id in 0..6 {
        client.offer(id, &[], pattern(1 << 20, id).into(), 0);
        kept.push(landed(&server, id).await);
        assert_eq!(server.endpoint.may_keep_landed(), kept.len() <= 4);
    }
    kept.truncate(4);
    assert!(server.endpoint.may_keep_landed());
}

/// A fetch that is cancelled ends without memory, and those beside it land.
#[tokio::test]
async fn a_fetch_can_be_cancelled() {
    let (client, server) = endpoints(&Config::default()).await;
    let (client, server) = (side(client), side(server));
    let mut buffer = Pool::for_sending(128 << 20).allocate(32 << 20).unwrap();
    buffer.fill(7);
    client.offer(1, &[], buffer.freeze(), 0);
    client.offer(2, &[], pattern(100_000, 2).into(), 0);
    // The fetches start with the first poll after this.
    server.until("the offers came", |it| it.landed.contains_key(&1) || it.landed.contains_key(&2)).await;
    server.cancel(1);
    server.until("both are over", |it| it.landed.len() == 2).await;
    assert!(landed(&server, 2).await == pattern(100_000, 2));
    all_taken(&client).await;
}

/// The memory of fetches goes back to its pool: many more bytes pass than the budget has.
#[tokio::test]
async fn landed_memory_is_used_again() {
    let small = MessageSettings { landing_budget: 2 << 20, ..settings() };
    let (client, server) = pair(&Config::default(), &small).await;
    for id in 0..200 {
        client.offer(id, &[], pattern(100_000, id).into(), 0);
        assert!(landed(&server, id).await == pattern(100_000, id));
    }
}
