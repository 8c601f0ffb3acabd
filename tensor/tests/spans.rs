//! The spans of links. The test has a process of its own, because it reads the log of all threads.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use support::{Log, Runtime, config};
use tonic_rdma_tensor::{Dtype, NamedOffer, RdmaDevice, Shape, Tensor, TensorSpec};

#[test]
fn the_life_of_a_link_is_a_span() {
    let log = Log::of_process();
    Runtime::MultiThread.run(async {
        let builder = RdmaDevice::builder().config(config()).queue_pairs_per_peer(2);
        let server = builder.clone().bind("127.0.0.1:0").await.unwrap();
        let client = builder.build().unwrap();
        let channel = client.channel(&server.endpoint(), 0).await.unwrap();
        let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4]).unwrap()).unwrap();
        let tensor = Tensor::copy_from(spec, &[1, 2, 3, 4]).unwrap();
        server.put("loss", 1, NamedOffer::Tensor(tensor), 1).unwrap();
        channel.request("loss", 1).await.unwrap();
        log.has(2, "a tensor link is open").await;
        assert_eq!(log.lines("close").len(), 0, "{}", log.text());

        let peer = format!("tensor_link{{peer=\"{}\"", server.endpoint());
        let own = log.lines(&peer);
        assert!(
            own.iter().all(|line| line.contains("device=\"") && line.contains("queue_pairs=2")),
            "{own:?}"
        );
        drop((channel, client));
        log.has(1, "a tensor link was closed").await;
        log.has(1, "a tensor link has ended").await;
        log.has(2, "close time.busy").await;
        for line in log.lines("a tensor link was closed") {
            assert!(line.contains(&peer), "{line}");
        }
        assert!(log.lines("a tensor link has ended")[0].contains("closed the link"), "{}", log.text());
    });
}
