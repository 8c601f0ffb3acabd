//! Completion queues and queue pairs: how many there are, what goes by which, and how many links a card has room
//! for. Each test has a process of its own, because it counts what the whole process asks of its device.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;
use std::time::Duration;

use support::{is_alone, is_alone_with, raise_open_files, within};
use tonic_rdma::Config;
use tonic_rdma_tensor::{
    Channel, DeviceBuilder, Dtype, NamedOffer, NamedReply, RdmaDevice, Shape, Tensor, TensorSpec,
};
use tonic_rdma_verbs::counting::{self, Counter, Limits};

/// What `Open` and the calls that follow go over has one queue pair at each end.
const OF_CALLS: u64 = 2;

fn spec(bytes: u64) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[bytes]).unwrap()).unwrap()
}

/// Returns a builder whose connections have small buffers, and send nothing without calls.
fn quiet(config: Config) -> DeviceBuilder {
    RdmaDevice::builder()
        .config(config.receive_slots(16).slot_size(1024).ping_interval(Duration::from_secs(3600)))
}

async fn connected(builder: DeviceBuilder) -> (RdmaDevice, RdmaDevice, Channel) {
    let server = builder.clone().bind("127.0.0.1:0").await.unwrap();
    let client = builder.build().unwrap();
    let channel = client.channel(&server.endpoint(), 0).await.unwrap();
    (server, client, channel)
}

/// Runs `test` on one thread, which polls the queues of all devices.
fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(within(test));
}

#[test]
fn variables_and_the_builder_set_the_numbers() {
    // The last one spares a real device its calibration.
    let variables = [
        ("RDMA_COMPLETION_QUEUES", "2"),
        ("RDMA_QUEUE_PAIRS_PER_PEER", "3"),
        ("RDMA_EAGER_THRESHOLD", "32k"),
    ];
    if !is_alone_with(concat!(module_path!(), "::variables_and_the_builder_set_the_numbers"), &variables) {
        return;
    }
    let counter = counting::count_all();
    let made = async |builder: DeviceBuilder| {
        let before = counter.counts();
        let (_server, _client, channel) = connected(builder).await;
        let counts = counter.counts().since(&before);
        assert_eq!(u64::from(channel.queue_pairs()), (counts.queue_pairs.created - OF_CALLS) / 2);
        (counts.completion_queues.created, counts.queue_pairs.created - OF_CALLS)
    };
    let config = || Config::from_env().unwrap();
    run(async {
        assert_eq!(made(RdmaDevice::builder()).await, (2, 2 * 3));
        assert_eq!(made(RdmaDevice::builder().queue_pairs_per_peer(5)).await, (2, 2 * 5));
        assert_eq!(made(RdmaDevice::builder().config(config().completion_queues(4))).await, (4, 2 * 3));
        assert_eq!(made(RdmaDevice::builder().config(config().queue_pairs_per_peer(4))).await, (2, 2 * 4));
        assert_eq!(made(RdmaDevice::builder().config(Config::default())).await, (1, 2));
    });
}

#[test]
fn a_wrong_variable_is_named() {
    let variables = [("RDMA_QUEUE_PAIRS_PER_PEER", "65")];
    if !is_alone_with(concat!(module_path!(), "::a_wrong_variable_is_named"), &variables) {
        return;
    }
    run(async {
        let error = RdmaDevice::bind("127.0.0.1:0").await.unwrap_err();
        assert_eq!(error.to_string(), "RDMA_QUEUE_PAIRS_PER_PEER=\"65\": takes a number from 1 to 64");
    });
}

/// Returns how many requests each queue pair sent meanwhile, of those that sent any.
async fn sent(counter: &Counter, work: impl Future<Output = ()>) -> Vec<u64> {
    let requests = || {
        let pairs = counter.queue_pairs().into_iter();
        pairs.map(|(number, posts)| (number, posts.requests)).collect::<BTreeMap<_, _>>()
    };
    let before = requests();
    work.await;
    let after = requests().into_iter();
    let sent = after.map(|(number, requests)| requests - before.get(&number).copied().unwrap_or(0));
    sent.filter(|requests| *requests > 0).collect()
}

#[test]
fn slots_and_names_are_spread_over_the_queue_pairs() {
    if !is_alone(concat!(module_path!(), "::slots_and_names_are_spread_over_the_queue_pairs")) {
        return;
    }
    const PAIRS: u32 = 4;
    let counter = counting::count_all();
    run(async {
        let (server, _client, channel) =
            connected(quiet(Config::from_env().unwrap()).queue_pairs_per_peer(PAIRS)).await;
        let (mut slots, mut senders) = (Vec::new(), Vec::new());
        for slot in 0..2 * PAIRS {
            let name = format!("slot {slot}");
            slots.push(server.static_receiver(&name, &spec(64), 1).unwrap());
            senders.push(channel.over(slot).static_sender(&name, &spec(64)).await.unwrap());
        }
        let by_slots = sent(&counter, async {
            for round in 0..10 {
                for (slot, sender) in slots.iter_mut().zip(&mut senders) {
                    sender.send_bytes(&[round; 64]).await.unwrap();
                    let mut bytes = [0; 64];
                    slot.recv().await.unwrap().copy_to(&mut bytes).unwrap();
                    assert_eq!(bytes, [round; 64]);
                }
            }
        });
        // Each write of a slot, and each release of a buffer, is one request.
        assert_eq!(by_slots.await, [20; 2 * PAIRS as usize]);

        let request = async |name: &str, step| {
            let tensor = Tensor::copy_from(spec(3), &[7, 8, step as u8]).unwrap();
            server.put(name, step, NamedOffer::Tensor(tensor), 1).unwrap();
            match channel.request(name, step).await.unwrap() {
                NamedReply::Tensor(tensor) => assert_eq!(tensor.bytes().unwrap(), [7, 8, step as u8]),
                NamedReply::Dead => panic!("a dead tensor"),
            }
        };
        let one_name = sent(&counter, async {
            for step in 0..10 {
                request("one name", step).await;
            }
        });
        assert_eq!(one_name.await.len(), 2, "one queue pair at each end");
        let names = sent(&counter, async {
            for name in 0..64 {
                request(&format!("name {name}"), 1).await;
            }
        });
        assert_eq!(names.await.len(), 2 * PAIRS as usize, "all queue pairs");
    });
}

/// Links of one process, each with both ends here. All of them have one completion queue.
const LINKS: usize = 500;

#[test]
fn a_card_has_room_for_500_links() {
    if !is_alone(concat!(module_path!(), "::a_card_has_room_for_500_links")) {
        return;
    }
    raise_open_files();
    let counter = counting::count_all();
    counter.limit(Limits::CARD);
    run(async {
        let builder = quiet(Config::default());
        let server = builder.clone().bind("127.0.0.1:0").await.unwrap();
        let mut slots = Vec::new();
        for link in 0..LINKS {
            let client = builder.clone().build().unwrap();
            let channel = client.channel(&server.endpoint(), 0).await.unwrap();
            let slot = server.static_receiver(&format!("slot {link}"), &spec(8), 1).unwrap();
            let sender = channel.static_sender(&format!("slot {link}"), &spec(8)).await.unwrap();
            slots.push((client, slot, sender));
        }
        for (link, (_, slot, sender)) in slots.iter_mut().enumerate() {
            sender.send_bytes(&link.to_ne_bytes()).await.unwrap();
            let mut bytes = [0; 8];
            slot.recv().await.unwrap().copy_to(&mut bytes).unwrap();
            assert_eq!(usize::from_ne_bytes(bytes), link);
        }
        let counts = counter.counts();
        let ends = 2 * LINKS as u64;
        assert_eq!((counts.completion_queues.alive(), counts.queue_pairs.alive()), (1, 2 * ends));
    });
}

/// Opens links until one can't be opened. Returns their number, and why there is no other.
async fn fill(builder: &DeviceBuilder) -> (usize, String) {
    let server = builder.clone().bind("127.0.0.1:0").await.unwrap();
    let mut clients = Vec::new();
    loop {
        let client = builder.clone().build().unwrap();
        match client.channel(&server.endpoint(), 0).await {
            Ok(channel) => clients.push((client, channel)),
            Err(error) => {
                assert!(clients.iter().all(|(_, channel)| channel.is_open()), "the others stay");
                return (clients.len(), error.to_string());
            }
        }
        assert!(clients.len() < 100, "no limit holds");
    }
}

#[test]
fn a_link_that_a_device_has_no_room_for_is_refused_with_the_limit() {
    if !is_alone(concat!(module_path!(), "::a_link_that_a_device_has_no_room_for_is_refused_with_the_limit"))
    {
        return;
    }
    let counter = counting::count_all();
    let mut limits = Limits::CARD;
    limits.completions = 16_383;
    counter.limit(limits);
    run(async {
        let (links, refusal) = fill(&quiet(Config::default())).await;
        assert!(
            refusal.contains("the completion queue of soft0 has room for 16383 completions"),
            "{refusal}"
        );
        assert!(
            refusal.contains("leave too few for another; RDMA_COMPLETION_QUEUES adds queues"),
            "{refusal}"
        );
        // The advice helps.
        let (more, _) = fill(&quiet(Config::default().completion_queues(4))).await;
        assert!(more > 3 * links && links > 3, "{links} links with one queue, {more} with four");
    });
}

#[test]
fn a_link_beyond_the_queue_pairs_of_a_device_is_refused() {
    if !is_alone(concat!(module_path!(), "::a_link_beyond_the_queue_pairs_of_a_device_is_refused")) {
        return;
    }
    let counter = counting::count_all();
    let mut limits = Limits::CARD;
    limits.queue_pairs = 37;
    counter.limit(limits);
    run(async {
        let (links, refusal) = fill(&quiet(Config::default()).queue_pairs_per_peer(4)).await;
        // Each link has 8 queue pairs here, and its calls have 2.
        assert_eq!(links, 3, "{refusal}");
        assert!(refusal.contains("queue pairs: asked for 38, the device has 37"), "{refusal}");
    });
}
