//! The end of queue pairs and regions, while another thread of this process carries out records.

use super::*;

/// When a queue pair and a region are dropped, no thread of this process writes to the memory any more.
#[test]
fn memory_of_a_dropped_queue_pair_stays() {
    const LENGTH: usize = 4 << 20;
    for round in 0..100 {
        let (a, b) = Side::connected();
        let (from, to) = (a.large(LENGTH, 1), b.large(LENGTH, 0));
        let remote = RemoteSegment { address: to.memory().address(), rkey: to.rkey() };
        // SAFETY: no reference to the memory exists.
        let data = unsafe { [LocalSegment::new(&*from, 0..LENGTH)] };
        let connection = a.core.connection().unwrap();
        let offer = connection.peer.offer(&connection.address, from.memory()).unwrap();
        wait_for("the mapping", || offer.is_mapped());
        // The device's thread carries the WRITE out, because no thread of `b` polls.
        assert!(a.post(Operation::Write { data: Payload::Registered(&data), remote, immediate: None }));
        let memory = Arc::clone(to.memory());
        wait_for("the first bytes", || memory.load_u64(round % 16 * 60_000).unwrap() != 0);
        drop((b, to));
        memory.copy_in(0, &[0; LENGTH]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        let mut bytes = vec![0; LENGTH];
        memory.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "round {round}");
    }
}
