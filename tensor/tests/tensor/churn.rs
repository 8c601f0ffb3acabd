//! A service that exports a region for every request, for long.

use std::fs::read_dir;

use tonic_rdma_tensor::Rights;

use crate::pair;

/// More than a link has words, and a day of one request every four seconds.
const REQUESTS: usize = 20_000;

/// Returns the numbers of open descriptors and of mappings of this process.
fn resources() -> [usize; 2] {
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    [read_dir("/proc/self/fd").unwrap().count(), mappings]
}

#[tokio::test]
#[ignore = "takes a minute; the tests of the link have fewer words, and use them up"]
async fn a_region_for_every_request() {
    let (server, client, channel) = pair().await;
    let mut before = resources();
    for request in 0..REQUESTS {
        if request == 1000 {
            before = resources();
        }
        let name = format!("request {request}");
        let exported = server.export(&name, server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
        let remote = channel.region(&name).await.unwrap();
        let mut local = client.allocate(64).unwrap();
        local.fill(request as u8);
        // The region goes only after the write.
        channel.write(&remote).from(local, ..).await.unwrap();
        let mut found = [0; 64];
        exported.memory().copy_out(0, &mut found).unwrap();
        assert!(found == [request as u8; 64], "request {request}");
    }
    let after = resources();
    assert!(after[0] <= before[0] + 100 && after[1] <= before[1] + 500, "{before:?}, then {after:?}");
}
