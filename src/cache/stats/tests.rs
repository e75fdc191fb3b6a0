use super::*;

#[test]
fn figures_are_serialized_by_name() {
    let mut stats = Stats { stores: 3, storage: "uring".into(), ..Stats::default() };
    stats.tiers[Tier::Disk as usize].hits = 5;
    stats.routes[Route::DiskToHost as usize].bytes = 7;
    stats.copies[1] = CopyFigures { batches: 2, bytes: 9 };
    let json = serde_json::to_value(&stats).expect("numbers, words and maps");
    assert_eq!(json["tiers"]["disk"]["hits"], 5);
    assert_eq!(json["tiers"].as_object().map(serde_json::Map::len), Some(Tier::WITH_REMOTE.len()));
    assert_eq!(json["routes"]["disk_to_host"]["bytes"], 7);
    assert_eq!(json["routes"].as_object().map(serde_json::Map::len), Some(Route::COUNT));
    assert_eq!(json["copies"]["cuda"], serde_json::json!({ "batches": 2, "bytes": 9 }));
    assert_eq!((&json["stores"], &json["storage"]), (&3.into(), &"uring".into()));
    assert_eq!(serde_json::from_value::<Stats>(json).expect("its own"), stats);
}

#[test]
fn figures_of_another_version_are_read() {
    let json = r#"{"stores": 3, "dreams": 9, "tiers": {"disk": {"hits": 5}, "tape": {"hits": 1}}}"#;
    let stats: Stats = serde_json::from_str(json).expect("a later one's, or an older one's");
    assert_eq!((stats.stores, stats.tier(Tier::Disk).hits, stats.misses), (3, 5, 0));
    serde_json::from_str::<Stats>(r#"{"stores": -1}"#).expect_err("no count");
}
