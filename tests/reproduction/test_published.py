from reproduction import published


def test_every_method_and_data_set_of_table_3_is_there():
    private = [method for method in published.METHODS if method != "sgd"]
    for dataset in published.DATASETS:
        methods = set(published.TABLE_3[dataset])
        assert methods == set(private) - ({"dp-sgd-hf"} if dataset == "imdb" else set())
        assert dataset in published.NON_PRIVATE
        assert dataset in published.DPSUR


def test_figures_are_per_cent_and_grow_with_epsilon():
    for lines in (*published.TABLE_3.values(), published.DPSUR):
        for grid in lines.values():
            assert list(grid.figures) == sorted(grid.figures)
            assert all(40 < figure < 100 for figure in grid.figures)


def test_a_few_cells_stand_where_the_paper_has_them():
    assert published.TABLE_3["fmnist"]["dpis-adaptive"].at(1.0) == 86.6
    assert published.TABLE_3["cifar10"]["dp-sgd"].at(0.5) == 43.1
    assert published.TABLE_3["imdb"]["dp-sgd-decay"].at(4.0) == 67.6
    assert published.TABLE_4_ADAPTIVE["imdb"].at(2.0) == 65.9
    assert published.TABLE_5["cifar10"].at(0.8) == 62.4
    assert published.TABLE_6["fmnist"].at(6.0) == 86.8
    assert published.TABLE_3["mnist"]["dp-sgd"].at(8.0) is None


def test_table_4_without_adaptive_clipping_is_table_3_but_for_texts():
    for dataset in ("mnist", "fmnist", "cifar10"):
        grid = published.TABLE_3[dataset]["dpis-adaptive"]
        assert published.TABLE_4_FIXED[dataset].figures == grid.figures[:4]
