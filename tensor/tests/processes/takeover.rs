//! Senders are killed one after another while they send, and the next sender takes the slot over at once. The
//! receiver gets only complete and new tensors, in order. `TENSOR_KILLS` sets the number of kills.

use std::time::{Duration, Instant};

use crate::{alone, device, seed_of, spec};
use support::{Child, Runtime, descriptors_and_mappings, settled};

const LENGTH: usize = 300_001;

#[test]
fn the_receiver_gets_only_complete_and_new_tensors() {
    let kills: u64 = std::env::var("TENSOR_KILLS").map_or(24, |kills| kills.parse().unwrap());
    alone(Runtime::MultiThread, async {
        drop(device().await);
        let before = descriptors_and_mappings();
        {
            let ours = device().await;
            let mut slot = ours.static_receiver("slot", &spec(LENGTH), 2).unwrap();
            let endpoint = ours.endpoint();
            let start = |process: u64| Child::start(&[], &format!("rush {endpoint} {process}"));
            let mut random = fastrand::Rng::with_seed(kills);
            let mut found = vec![0; LENGTH];
            let (mut last, mut taken) = (None, 0_u64);
            // The next sender already waits for the death of this sender.
            let mut next = start(1);
            for process in 1..=kills {
                let doomed = std::mem::replace(&mut next, tokio::task::block_in_place(|| start(process + 1)));
                let until = Instant::now() + Duration::from_micros(random.u64(0..12_000));
                let mut doomed = Some(doomed);
                // Waits for some tensors of the next process.
                let mut of_the_next = 0;
                let deadline = Instant::now() + Duration::from_secs(60);
                while of_the_next < 2 {
                    assert!(Instant::now() < deadline, "process {} sends nothing", process + 1);
                    if Instant::now() >= until {
                        drop(doomed.take());
                    }
                    // The end of the last sender is expected.
                    let Ok(arrived) = slot.try_recv() else {
                        tokio::time::sleep(Duration::from_micros(100)).await;
                        continue;
                    };
                    let Some(arrived) = arrived else {
                        tokio::task::yield_now().await;
                        continue;
                    };
                    arrived.copy_to(&mut found).unwrap();
                    drop(arrived);
                    let seed = seed_of(&found);
                    assert!(last.is_none_or(|last| seed > last), "{seed:x} after {last:x?}");
                    last = Some(seed);
                    taken += 1;
                    of_the_next += u64::from(seed >> 32 == process + 1);
                }
            }
            println!("{taken} tensors of {} processes, all but the last of which were killed", kills + 1);
        }
        settled(before).await;
    });
}
